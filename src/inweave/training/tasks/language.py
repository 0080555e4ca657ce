"""Texts as a task: a causal language model, the same loop.

A text begins with the tokenizer's begin-of-text token, if it adds one, and ends with its end-of-text token, which is
trained. A text longer than the model's context is split. Rows of a batch are padded on the right, and padding does not
count; the loss is the mean over rows of the mean over their trained tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.models.families.base import Tensors
from inweave.training.config.schema import TrainConfig
from inweave.training.data.batches import Order

LENGTH = 1024  # tokens of an example, at most
_IGNORED = -100


class LanguageTask:
    """See `inweave.training.tasks.base.Task`. Examples are (token ids, which of them count in the loss).

    ``device``: where to train, if the network is not there yet.
    """

    def __init__(
        self,
        network: Any,
        tokenizer: Any,
        texts: list[tuple[str, str]],
        config: TrainConfig,
        device: torch.device | None = None,
    ) -> None:
        self.networks: dict[str, nn.Module] = {"model": network}
        self.device, self.dtype = device or network.device, network.dtype
        self.config = config
        self.texts = len(texts)
        candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self._padding = next(token for token in candidates if token is not None)
        length = min(LENGTH, getattr(network.config, "max_position_embeddings", LENGTH) or LENGTH)
        self.examples = [example for prompt, text in texts for example in _tokenize(tokenizer, prompt, text, length)]
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

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.examples).encode()).hexdigest()

    def metadata(self) -> dict[str, str]:
        return {"inweave.texts": str(self.texts)}


def token_loss(network: nn.Module, inputs: Tensors) -> torch.Tensor:
    """Return the mean over rows of the mean cross-entropy over the tokens that count."""
    mask = inputs.get("attention_mask")
    predictions = network(input_ids=inputs["input_ids"], attention_mask=mask, use_cache=False).logits
    logits, labels = predictions[:, :-1].float(), inputs["labels"][:, 1:]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=_IGNORED, reduction="none")
    counted = labels != _IGNORED
    rows = (losses * counted).sum(1) / counted.sum(1).clamp_min(1)
    return rows.mean()


def _tokenize(tokenizer: Any, prompt: str, text: str, length: int) -> list[tuple[list[int], list[bool]]]:
    """Return the examples from a text: (token ids, which of them count), each of ``length`` at most."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    start = [bos] if bos is not None and tokenizer("a").input_ids[:1] == [bos] else []
    before = [*start, *(tokenizer(prompt, add_special_tokens=False).input_ids if prompt else [])]
    after = [*tokenizer(text, add_special_tokens=False).input_ids, *([eos] if eos is not None else [])]
    tokens, counts = [*before, *after], [False] * len(before) + [True] * len(after)
    rows = [(tokens[i : i + length], counts[i : i + length]) for i in range(0, len(tokens), length)]
    return [row for row in rows if len(row[0]) > 1 and any(row[1][1:])]
