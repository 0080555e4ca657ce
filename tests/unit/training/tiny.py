"""A run so small that hundreds of them fit into a test: two linear layers behind the task protocol.

It does everything a real task does: buckets of two lengths, noise, captions that are sometimes dropped, validation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from inweave.models.families.base import Tensors
from inweave.targets.index import ModelIndex, component_from_names
from inweave.training.config.schema import TrainConfig
from inweave.training.data.batches import Order
from inweave.training.distributed.world import World
from inweave.training.loop import Run

WIDTH = 8
OPTIMIZERS = ("adamw", "adamw8bit", "prodigy", "schedulefree", "adafactor")
EVERYTHING: dict[str, Any] = {  # all that a resumed run could get wrong
    "gradient_accumulation": 2, "ema_decay": 0.9, "dropout": 0.25, "caption_dropout": 0.5, "lr_scheduler": "cosine",
    "warmup": 2,
}  # fmt: skip


class TinyNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.to_q, self.to_k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / WIDTH**0.5

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.to_k(torch.tanh(self.to_q(x)) + text)
        return out


class TinyTask:
    """``poison``: what is wrong with the losses from now on; ``limit``: rows that fit into memory."""

    def __init__(self, config: TrainConfig, *, examples: int = 10, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device("cpu")
        self.networks: Mapping[str, nn.Module] = {"model": TinyNetwork().requires_grad_(False)}
        generator = torch.Generator().manual_seed(1)
        lengths = [3 if number % 3 else 2 for number in range(examples)]
        self.examples = [torch.randn(length, WIDTH, generator=generator) for length in lengths]
        validation_size = round(examples * config.validation_split)
        self.held_out = [(number,) for number in range(examples - validation_size, examples)]
        repeats = tuple(int(number < examples - validation_size) for number in range(examples))
        self.order = Order(tuple(lengths), repeats, config.batch_size, config.seed)
        self.sampled_batches: list[tuple[int, ...]] = []
        self.poison = ""
        self.limit = 1000

    def sample_batch(self, batch: tuple[int, ...], generators: Sequence[torch.Generator]) -> Tensors:
        self.sampled_batches.append(batch)
        rows = torch.stack([self.examples[number] for number in batch])
        captioned = torch.cat([torch.rand(1, generator=each) for each in generators]) >= self.config.caption_dropout
        return {
            "rows": rows,
            "noise": torch.stack([torch.randn(rows.shape[1:], generator=each) for each in generators]),
            "text": captioned.float()[:, None, None].expand(len(batch), 1, WIDTH).contiguous(),
        }

    def loss(self, inputs: Tensors) -> torch.Tensor:
        if len(inputs["rows"]) > self.limit:
            raise torch.OutOfMemoryError("tried to allocate 1 GiB")
        prediction = self.networks["model"](inputs["rows"] + inputs["noise"], inputs["text"]).to(self.dtype)
        error = (prediction - inputs["noise"].to(self.dtype)).square()
        loss = error.float().mean()
        if self.poison == "gradient":  # a finite loss whose gradient is not
            loss = loss + (prediction.float().sum() * 0).sqrt()
        if self.poison == "loss":  # and the other way round
            loss = loss + torch.tensor(float("nan"))
        return loss * {"nan": float("nan"), "inf": float("inf")}.get(self.poison, 1.0)

    def new_notes(self) -> list[str]:
        return []

    def fingerprint(self) -> str:
        return f"{len(self.examples)} examples"

    def metadata(self) -> dict[str, str]:
        return {"inweave.texts": str(len(self.examples))}


class TinyRun(Run):
    """A run of a `TinyTask`."""

    task: TinyTask


def config(output: Path, **settings: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "model": "tiny", "dataset": "-", "output": str(output), "name": "t", "steps": 8, "batch_size": 2, "rank": 2,
        "learning_rate": 0.05, "targets": ["to_q", "to_k"], "dialect": "peft", "save_dtype": "fp32", "log_every": 1,
        "precision": "fp32",
    }  # fmt: skip
    if settings.get("optimizer") == "prodigy":
        usual["learning_rate"] = 1.0
    return TrainConfig.of(**{**usual, **settings})


def tiny(
    output: Path, *, world: World | None = None, dtype: torch.dtype = torch.float32, examples: int = 10, **settings: Any
) -> TinyRun:
    """A run that has not begun."""
    return make_run(
        config(output, **settings), world, TinyTask(config(output, **settings), examples=examples, dtype=dtype)
    )


def make_run(config: TrainConfig, world: World | None = None, task: TinyTask | None = None, **options: Any) -> TinyRun:
    task = task or TinyTask(config)
    shapes = {name: tuple(value.shape) for name, value in task.networks["model"].state_dict().items()}
    index = ModelIndex({"model": component_from_names("model", shapes)}, source="tiny")
    return TinyRun(task, task.networks["model"], index, config, world, **options)


def log(output: Path) -> list[dict[str, Any]]:
    """Every line, as strict JSON."""

    def refused(text: str) -> Any:
        raise AssertionError(f"{text} is not JSON")

    lines = (output / "t.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line, parse_constant=refused) for line in lines]


def file_bits(path: Path) -> dict[str, bytes]:
    """The tensors of a PEFT folder, bit for bit."""
    tensors = load_file(path / "adapter_model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def state_bits(run: Run) -> dict[str, bytes]:
    return {
        name: value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, value in run.step.state().items()
    }
