"""The retention of checkpoints, and interim ones besides those of `save_every`.

An interim checkpoint limits the work that a killed process loses to a time, independent of `save_every`: it is kept
until the next checkpoint of any kind, has no adapter of its own, and counts for neither keep_last nor keep_every.
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from inweave.training.checkpoint.store import State, save_state


@dataclass(slots=True)
class CheckpointSchedule:
    """The checkpoints of one run; ``seconds``: the longest time between two of them."""

    folder: Path
    keep_last: int
    keep_every: int
    seconds: float = math.inf
    _saved_at: float = field(default_factory=time.monotonic)
    _interim: Path | None = None

    @property
    def timed(self) -> bool:
        return math.isfinite(self.seconds)

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self._saved_at >= self.seconds

    def restart_clock(self) -> None:
        self._saved_at = time.monotonic()

    def save(self, state: State, *, interim: bool = False) -> None:
        """Write a checkpoint, then remove those that it replaces."""
        keep = 0 if interim or not self.keep_last else self.keep_last + (self._interim is not None)
        path = save_state(self.folder, state, keep, keep_every=self.keep_every)
        if self._interim not in (None, path):
            shutil.rmtree(self._interim, ignore_errors=True)
        self._interim = path if interim else None
