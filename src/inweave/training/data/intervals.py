"""Intervals of a run: every k steps, every k epochs, or both.

steps    after steps k, 2 k, 3 k, ...
epochs   after the step that completes epoch k, 2 k, 3 k, ...: step s has completed floor(s b / n) epochs, where b is
         the number of micro-batches of a step, over all processes, and n that of an epoch
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """``steps`` and ``epochs``: 0 for never; false if both are 0."""

    steps: int
    epochs: int
    batches_per_step: int
    batches_per_epoch: int

    def __bool__(self) -> bool:
        return bool(self.steps or self.epochs)

    def due(self, step: int) -> bool:
        """Return whether the interval ends after step number ``step``, counted from 1."""
        if self.steps and step % self.steps == 0:
            return True
        return bool(self.epochs) and self._epochs(step) // self.epochs > self._epochs(step - 1) // self.epochs

    def _epochs(self, step: int) -> int:
        return step * self.batches_per_step // self.batches_per_epoch
