"""Preparing a run, whatever it trains on: what is known without weights (`Setup`), and what is there with them (`Loaded`).

Setup    dataset read, model identified, settings complete; can be checked, estimated and planned
Loaded   the task on a loaded model, its caches, its samples
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from inweave.targets.index import ModelIndex
from inweave.training.config.schema import TrainConfig
from inweave.training.distributed.world import World
from inweave.training.memory.estimate import Measurable
from inweave.training.output.samples import SampleImage
from inweave.training.tasks.base import Task

OnProgress = Callable[[str, int, int], None]  # (what, done, of)
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Report(Protocol):
    """What a run would see of its dataset."""

    @property
    def batches_per_epoch(self) -> int: ...

    @property
    def total_steps(self) -> int: ...

    def as_dict(self) -> dict[str, Any]: ...

    def lines(self) -> list[str]: ...


class Loaded(Protocol):
    """A task on a loaded model."""

    @property
    def task(self) -> Task: ...

    @property
    def model(self) -> Any:
        """What `base_digest` and the metadata describe."""
        ...

    @property
    def index(self) -> ModelIndex:
        """The base, under the names of files."""
        ...

    @property
    def base_file(self) -> Path | None:
        """The checkpoint of the base, if it is one file."""
        ...

    def fill_caches(self, world: World, on_progress: OnProgress | None) -> None:
        """Encode what no step should wait for."""
        ...

    def shard(self, world: World) -> str:
        """Shard the frozen base over all processes; returns what to report."""
        ...

    def fuse_blocks(self) -> None:
        """Give the trained networks blocks with fewer passes over memory, for a GPU; adapters are attached already."""
        ...

    def notes(self) -> list[str]:
        """What to report about the dataset."""
        ...

    def sampler(self) -> Callable[[int], list[SampleImage]] | None:
        """What generates samples, if any are wanted."""
        ...


class Setup(Protocol):
    """A run before any weight is read."""

    @property
    def config(self) -> TrainConfig:
        """With every open setting decided by the model's preset and the device."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def measurable(self) -> Measurable: ...

    def sizes(self) -> dict[str, Any]:
        """The ``side`` and ``chunks`` of the largest example, for `plan_run` and `estimate`."""
        ...

    def validate(self, config: TrainConfig) -> None:
        """Refuse what can be refused without weights: targets, rules, masks, sample prompts."""
        ...

    def problems(self, config: TrainConfig) -> list[str]:
        """Return why this run would be refused: its dataset, or what the model or the device cannot do."""
        ...

    def report(self, config: TrainConfig, processes: int) -> tuple[Report, list[str]]:
        """Return (the dataset as the run sees it, what else to note)."""
        ...

    def load(self, config: TrainConfig, world: World, *, staged: bool) -> Loaded:
        """Read the weights and build the task; ``staged``: networks wait in host memory."""
        ...
