"""Words as a task: a causal language model from a folder, texts from a file, the same loop.

    .txt     one text a paragraph (blank lines between)
    .jsonl   {"text": "..."} a line, or {"prompt": "...", "completion": "..."}: only the completion is judged

A text begins with the mark the model's tokenizer puts there and ends with its end mark, which is learnt. One longer than
the model reads is cut into pieces of that length. Rows of a batch are filled up on the right and what was filled in does
not count; the loss is the mean over rows of the mean over the tokens that do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.models.language_models import blank_language_model, load_language_model, load_tokenizer
from inweave.ops.device import DTYPES, choose_device, choose_dtype
from inweave.targets.index import ModelIndex, component_from_names
from inweave.training.config.fields import names_where
from inweave.training.config.schema import TrainConfig
from inweave.training.data.batches import Order, total_steps
from inweave.training.data.texts import TextReport, read_texts
from inweave.training.distributed.fsdp import check_shard, shard_base
from inweave.training.distributed.world import World
from inweave.training.loop import Run
from inweave.training.memory.checkpointing import apply_checkpointing
from inweave.training.memory.estimate import Plan, Words, enforce, estimate, seconds_for
from inweave.training.memory.meta import Measured, Meter, measure_network
from inweave.training.memory.oom import needing
from inweave.training.memory.plan import within_limit
from inweave.training.output.adapter_file import refusals
from inweave.training.tasks.base import Tensors

LENGTH = 1024  # tokens of an example, at most
_IGNORED = -100
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class LanguageTask:
    """See `inweave.training.tasks.base.Task`. Examples are (token numbers, which of them count)."""

    def __init__(
        self,
        network: Any,
        tokenizer: Any,
        texts: list[tuple[str, str]],
        config: TrainConfig,
        device: torch.device | None = None,
    ) -> None:
        """``device``: of the work, where the network is not there yet."""
        self.networks: dict[str, nn.Module] = {"model": network}
        self.device, self.dtype = device or network.device, network.dtype
        self.config = config
        self.texts = len(texts)
        marks = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self._padding = next(mark for mark in marks if mark is not None)
        length = min(LENGTH, getattr(network.config, "max_position_embeddings", LENGTH) or LENGTH)
        self.examples = [piece for prompt, text in texts for piece in _pieces(tokenizer, prompt, text, length)]
        if not self.examples:
            raise ConfigError(f"{config.dataset}: no text in it is longer than one token")
        count = min(round(len(self.examples) * config.validation_split), len(self.examples) - 1)
        kept = len(self.examples) - count
        size = config.batch_size
        self.held_out: Sequence[tuple[int, ...]] = [
            tuple(range(start, min(start + size, len(self.examples))))
            for start in range(kept, len(self.examples), size)
        ]
        slots = tuple(len(ids).bit_length() for ids, _ in self.examples)  # rows of a batch are of one order of length
        repeats = tuple(int(number < kept) for number in range(len(self.examples)))
        self.order = Order(slots, repeats, size, config.seed)

    def draw(self, batch: tuple[int, ...], generator: torch.Generator) -> Tensors:
        longest = max(len(self.examples[number][0]) for number in batch)
        ids = torch.full((len(batch), longest), self._padding)
        labels = torch.full((len(batch), longest), _IGNORED)
        seen = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, number in enumerate(batch):
            tokens, counts = self.examples[number]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, : len(tokens)] = torch.where(torch.tensor(counts), torch.tensor(tokens), _IGNORED)
            seen[row, : len(tokens)] = 1
        return {"input_ids": ids, "labels": labels, "attention_mask": seen}

    def loss(self, inputs: Tensors) -> torch.Tensor:
        return loss_of(self.networks["model"], inputs)

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.examples).encode()).hexdigest()

    def metadata(self) -> dict[str, str]:
        return {"inweave.texts": str(self.texts)}


def loss_of(network: nn.Module, inputs: Tensors) -> torch.Tensor:
    """The mean over rows of the mean over the tokens that count."""
    answers = network(
        input_ids=inputs["input_ids"], attention_mask=inputs.get("attention_mask"), use_cache=False
    ).logits
    logits, labels = answers[:, :-1].float(), inputs["labels"][:, 1:]
    each = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=_IGNORED, reduction="none")
    counted = labels != _IGNORED
    rows = (each * counted).sum(1) / counted.sum(1).clamp_min(1)
    return rows.mean()


def language_run(config: TrainConfig, world: World) -> Run:
    """A run on the causal language model in a folder."""
    check_shard(config, world)
    opened = _open(config, world)
    config, planned, device = opened.config, opened.planned, opened.device
    if planned is not None:
        enforce(planned.limit, device)
    where = torch.device("cpu") if config.shard else device
    with needing(f"load {config.model}", "another precision, or `shard` with several processes, is the only way"):
        network, tokenizer = load_language_model(Path(config.model), where, DTYPES[config.precision])
    task = LanguageTask(network, tokenizer, opened.texts, config, device)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    index = ModelIndex({"model": component_from_names("model", shapes)}, source=config.model)
    run = Run(task, network, index, config, world)
    if planned is not None:
        run.choices = list(planned.reasons)
        run.meter = Meter(device, planned.estimate["kept_bytes"])
    if config.shard:
        run.choices.append(shard_base(network, world, device))
    apply_checkpointing(task.networks, config.gradient_checkpointing)
    return run


def check_texts(config: TrainConfig, processes: int = 1) -> tuple[TrainConfig, TextReport, dict[str, Any]]:
    """What would be trained, and on what; nothing is, and no weight is read."""
    opened = _open(config, World())
    config, planned, task = opened.config, opened.planned, opened.task
    counts = [flags for _, flags in task.examples]
    micro_batches = config.gradient_accumulation * processes
    total = total_steps(len(task.order), micro_batches, steps=config.steps, epochs=config.epochs)
    report = TextReport(
        task.texts, len(counts), sum(map(len, counts)), sum(map(sum, counts)), sum(map(len, task.held_out)), len(task.order), total
    )  # fmt: skip
    needs = dict(planned.estimate if planned is not None else estimate(_measurable(config, task), config))
    needs |= {"steps": total, "choices": list(planned.reasons) if planned is not None else []}
    needs["problems"] = refusals(config, bool(task.held_out))
    needs["seconds"] = seconds_for(needs["work_per_step"] * total, opened.device, DTYPES[config.precision])
    return config, report, needs


@dataclass(frozen=True, slots=True)
class _Opened:
    """``task``: on a network without weights."""

    config: TrainConfig
    texts: list[tuple[str, str]]
    task: LanguageTask
    device: torch.device
    planned: Plan | None


def _open(config: TrainConfig, world: World) -> _Opened:
    """The texts, the memory, and the configuration with every question answered; no weights."""
    said, wrong = config.model_fields_set, []
    if "dialect" in said and config.dialect != "peft":
        wrong.append(f'dialect: language models have no names in "{config.dialect}"; leave it out, or say "peft"')
    if config.sample_every:
        wrong.append("sample_every: only pictures can be drawn while training; leave it out")
    if config.train_text_encoders:
        wrong.append("train_text_encoders: a language model has none; leave it out")
    defaults = TrainConfig.model_fields
    wrong += [
        f"{name}: is for pictures, and means nothing to a language model; leave it out"
        for name in sorted(names_where(task="image") & said)
        if getattr(config, name) != defaults[name].get_default(call_default_factory=True)
    ]
    if wrong:
        raise ConfigError(wrong)
    texts = read_texts(Path(config.dataset))
    device = choose_device(world.device(config.device))
    dtype = choose_dtype(config.precision if "precision" in said else None, device)
    config = config.with_preset("llm").model_copy(update={"dialect": "peft", "precision": _PRECISIONS[dtype]})
    folder = Path(config.model)
    blank, tokenizer = blank_language_model(folder, dtype), load_tokenizer(folder)
    task = LanguageTask(blank, tokenizer, texts, config, device)
    planned = within_limit(_measurable(config, task), config, device, world)
    if planned is not None and planned.changes:
        config = planned.config
        task = LanguageTask(blank, tokenizer, texts, config, device)
    return _Opened(config, texts, task, device, planned)


def _measurable(config: TrainConfig, task: LanguageTask) -> Words:
    """The longest example, on the meta device."""
    longest = max(len(tokens) for tokens, _ in task.examples)

    def measured(said: TrainConfig, dtype: torch.dtype, checkpoint: Any) -> Measured:
        network = blank_language_model(Path(config.model), dtype)
        row = torch.empty(1, longest, dtype=torch.int64, device="meta")
        # a mask that is ready: of any other the library asks what it holds, and here it holds nothing
        mask = torch.empty(1, 1, longest, longest, dtype=torch.bool, device="meta")
        inputs = {"input_ids": row, "labels": row, "attention_mask": mask}
        return measure_network(network, said, checkpoint, lambda: loss_of(network, inputs))

    return Words(DTYPES[config.precision], measured)


def _pieces(tokenizer: Any, prompt: str, text: str, length: int) -> list[tuple[list[int], list[bool]]]:
    mark, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    begin = [mark] if mark is not None and tokenizer("a").input_ids[:1] == [mark] else []
    before = [*begin, *(tokenizer(prompt, add_special_tokens=False).input_ids if prompt else [])]
    after = [*tokenizer(text, add_special_tokens=False).input_ids, *([end] if end is not None else [])]
    tokens, counts = [*before, *after], [False] * len(before) + [True] * len(after)
    rows = [(tokens[i : i + length], counts[i : i + length]) for i in range(0, len(tokens), length)]
    return [row for row in rows if len(row[0]) > 1 and any(row[1][1:])]
