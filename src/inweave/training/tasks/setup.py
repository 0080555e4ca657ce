"""Preparing a run of any task, before (`Setup`) and after (`LoadedTask`) weights are read.

Setup        dataset read, model identified, settings complete; can be checked, estimated and planned
LoadedTask   the task on a loaded model, its caches, its samples
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

OnProgress = Callable[[str, int, int], None]  # (activity, done, total)
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class DataReport(Protocol):
    """The dataset of a run."""

    @property
    def batches_per_epoch(self) -> int: ...

    @property
    def total_steps(self) -> int: ...

    def as_dict(self) -> dict[str, Any]: ...

    def lines(self) -> list[str]: ...


class LoadedTask(Protocol):
    """A task on a loaded model."""

    @property
    def task(self) -> Task: ...

    @property
    def model(self) -> Any:
        """The base that `base_digest` and the metadata describe."""
        ...

    @property
    def index(self) -> ModelIndex:
        """The base, with the tensor names of files."""
        ...

    @property
    def base_file(self) -> Path | None:
        """The checkpoint of the base, if it is a single file."""
        ...

    def fill_caches(self, world: World, on_progress: OnProgress | None) -> None:
        """Encode images and texts before the first step."""
        ...

    def shard(self, world: World) -> str:
        """Shard the frozen base over all processes; returns a note for the log."""
        ...

    def fuse_blocks(self) -> None:
        """Replace blocks of the trained networks by fused ones, for a GPU; adapters are attached already."""
        ...

    def notes(self) -> list[str]:
        """Return notes for the log about the dataset."""
        ...

    def sampler(self) -> Callable[[int], list[SampleImage]] | None:
        """Return the function that generates samples; None if none are configured."""
        ...


class Setup(Protocol):
    """A run before any weight is read."""

    @property
    def config(self) -> TrainConfig:
        """The configuration with every open setting filled in from the model's preset and the device."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def measurable(self) -> Measurable: ...

    def sizes(self) -> dict[str, Any]:
        """Return the ``side`` and ``chunks`` of the largest example, for `plan_run` and `estimate`."""
        ...

    def validate(self, config: TrainConfig) -> None:
        """Raise ConfigError for problems that need no weights: targets, rules, masks, sample prompts."""
        ...

    def problems(self, config: TrainConfig) -> list[str]:
        """Return the reasons to refuse this run: its dataset, or something the model or the device cannot do."""
        ...

    def report(self, config: TrainConfig, processes: int) -> tuple[DataReport, list[str]]:
        """Return (the report on the dataset of the run, further notes)."""
        ...

    def load(self, config: TrainConfig, world: World, *, staged: bool) -> LoadedTask:
        """Read the weights and build the task; ``staged``: keep networks in host memory until they are needed."""
        ...
