"""A device as the scheduler sees it."""

from __future__ import annotations

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
    """What a device holds and does; ``free_at``: when its job will probably end, on the clock of the scheduler."""

    name: str
    role: TrainingRole = TrainingRole.MIXED
    ready: bool = True
    models: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()
    job: Candidate | None = None
    free_at: float = field(default=0.0)

    @property
    def training(self) -> bool:
        """Whether the device runs a train job."""
        return self.job is not None and self.job.kind == "train"

    def takes(self, kind: str) -> bool:
        """Return whether the role of the device allows a kind of job."""
        return self.role is not (TrainingRole.IMAGES if kind == "train" else TrainingRole.TRAINING)
