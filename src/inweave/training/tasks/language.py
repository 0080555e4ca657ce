"""Texts as a task: a causal language model, the same loop.

`inweave.training.data.token_rows` makes examples of texts. Rows of a batch are padded on the right, and padding does
not count. The loss of an update is the mean over the tokens that the loss covers, in all of its micro-batches on all
processes: how examples are divided into batches changes rounding only, and a short answer counts by its length.

    loss(batch) = sum of -log p(token) / tokens        weight(batch) = tokens, that the loss covers
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.files.paths import exists, expand_home
from inweave.formats.dialects.base import BASE_MODEL, TASK_TYPE
from inweave.models.families.base import Tensors
from inweave.models.open import hub_id
from inweave.training.config.schema import TrainConfig
from inweave.training.data.batches import Order
from inweave.training.data.texts import Text
from inweave.training.data.token_rows import token_rows
from inweave.weights.streaming.stream import BlockStream

_IGNORED = -100


class LanguageTask:
    """See `inweave.training.tasks.base.Task`. Examples are (token ids, which of them count in the loss).

    ``device``: where to train, if the network is not there yet.
    """

    def __init__(
        self,
        network: Any,
        tokenizer: Any,
        texts: Sequence[Text],
        config: TrainConfig,
        device: torch.device | None = None,
    ) -> None:
        self.networks: dict[str, nn.Module] = {"model": network}
        self.device, self.dtype = device or network.device, network.dtype
        self.config = config
        self.stream: BlockStream | None = None  # of the network's blocks
        self.texts = len(texts)
        candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self._padding = next(token for token in candidates if token is not None)
        self.examples, self.cuts = token_rows(tokenizer, texts, _length(network, config))
        if not self.examples:
            raise ConfigError(f"{config.dataset}: no text in it is longer than one token")
        count = min(round(len(self.examples) * config.validation_split), len(self.examples) - 1)
        trained = len(self.examples) - count
        size = config.batch_size
        self.held_out: Sequence[tuple[int, ...]] = [
            tuple(range(start, min(start + size, len(self.examples))))
            for start in range(trained, len(self.examples), size)
        ]
        buckets = tuple(len(ids).bit_length() for ids, _ in self.examples)  # rows of a batch have similar lengths
        repeats = tuple(int(number < trained) for number in range(len(self.examples)))
        self.order = Order(buckets, repeats, size, config.seed)

    def sample_batch(self, batch: tuple[int, ...], generators: Sequence[torch.Generator]) -> Tensors:
        longest = max(len(self.examples[number][0]) for number in batch)
        ids = torch.full((len(batch), longest), self._padding)
        labels = torch.full((len(batch), longest), _IGNORED)
        mask = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, number in enumerate(batch):
            tokens, counts = self.examples[number]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, : len(tokens)] = torch.where(torch.tensor(counts), torch.tensor(tokens), _IGNORED)
            mask[row, : len(tokens)] = 1
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}

    def loss(self, inputs: Tensors) -> torch.Tensor:
        return token_loss(self.networks["model"], inputs)

    def new_notes(self) -> list[str]:
        return []

    def weight(self, inputs: Tensors) -> float:
        """Return the number of tokens that the loss covers; the first of a row is predicted from nothing."""
        return float((inputs["labels"][:, 1:] != _IGNORED).sum())

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.examples).encode()).hexdigest()

    def metadata(self) -> dict[str, str]:
        """Return the data's metadata, and what PEFT needs to open the base: its name, a path if it is a folder."""
        folder = expand_home(self.config.model)
        base = str(folder.resolve()) if exists(folder) else hub_id(self.config.model)
        return {"inweave.texts": str(self.texts), BASE_MODEL: base, TASK_TYPE: "CAUSAL_LM"}


def token_loss(network: nn.Module, inputs: Tensors) -> torch.Tensor:
    """Return the mean cross-entropy over the tokens that the loss covers."""
    mask = inputs.get("attention_mask")
    predictions = network(input_ids=inputs["input_ids"], attention_mask=mask, use_cache=False).logits
    logits, labels = predictions[:, :-1].float(), inputs["labels"][:, 1:]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=_IGNORED, reduction="none")
    return losses.sum() / (labels != _IGNORED).sum().clamp_min(1)


def _length(network: Any, config: TrainConfig) -> int:
    """Return the tokens of an example, at most: `max_length`, within the context of the model."""
    context = getattr(network.config, "max_position_embeddings", None) or config.max_length
    if context < config.max_length and "max_length" in config.explicit_fields:
        raise ConfigError(f"max_length: this model reads {context} tokens, and {config.max_length} are set; lower it")
    return min(config.max_length, context)
