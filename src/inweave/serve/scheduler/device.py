"""A device as the scheduler sees it: its role, what it has loaded, what it runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from inweave.serve.jobs.candidate import Candidate


class TrainingRole(Enum):
    """Which kinds of jobs a device takes."""

    MIXED = "images, and training unless it is the last device that makes images"
    TRAINING = "only training"
    IMAGES = "only images"


@dataclass(slots=True)
class DeviceView:
    """What a device holds and does; ``free_at``: when its job will probably end, on the clock of the scheduler.

    ``joined``: the jobs that share batches with ``job``, by id.
    """

    name: str
    role: TrainingRole = TrainingRole.MIXED
    ready: bool = True
    models: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()
    job: Candidate | None = None
    free_at: float = field(default=0.0)
    node: str = ""  # the machine it is in, of several
    joined: dict[str, Candidate] = field(default_factory=dict)
    mixed: bool = True  # whether jobs with other LoRAs may join

    @property
    def jobs(self) -> list[Candidate]:
        """The jobs that it runs."""
        return [*filter(None, [self.job]), *self.joined.values()]

    def add(self, job: Candidate) -> None:
        """Add a job that it runs from now on."""
        if self.job is None:
            self.job = job
        else:
            self.joined[job.id] = job

    def remove(self, job: str) -> Candidate | None:
        """Remove a job that it does not run any more, and return it."""
        if self.job is None or self.job.id != job:
            return self.joined.pop(job, None)
        ended, self.job = self.job, self.joined.pop(next(iter(self.joined), ""), None)
        return ended

    @property
    def training(self) -> bool:
        """Whether the device runs a train job."""
        return self.job is not None and self.job.kind == "train"

    def takes(self, kind: str) -> bool:
        """Return whether the role of the device allows a kind of job."""
        return self.role is not (TrainingRole.IMAGES if kind == "train" else TrainingRole.TRAINING)


def device_names(devices: Sequence[str]) -> list[str]:
    """Return the names of devices for people; several processes on the CPU are cpu#1, cpu#2."""
    if not devices:
        return ["the device"]
    return [
        f"{each}#{devices[: number + 1].count(each)}" if devices.count(each) > 1 else each
        for number, each in enumerate(devices)
    ]


def threads_each(devices: Sequence[str]) -> int | None:
    """Return the threads of each model process on the CPU; None if there is at most one."""
    return max(1, (os.cpu_count() or 1) // devices.count("cpu")) if devices.count("cpu") > 1 else None


def training_role(device: str | None, train_devices: Sequence[str]) -> TrainingRole:
    """Return which jobs a device takes."""
    if not train_devices:
        return TrainingRole.MIXED
    return TrainingRole.TRAINING if device in train_devices else TrainingRole.IMAGES
