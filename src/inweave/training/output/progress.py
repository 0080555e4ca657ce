"""The numbers a run reports about its steps: losses and their running average, speed, memory.

    loss           of the step
    loss_average   the mean of the last 100 steps, or of all if there are fewer, those that are not finite left out

The loss of a step depends on the timesteps it drew far more than on what was learned; the average shows that. The last 100
losses are part of a checkpoint, so that a resumed run reports the average of a run that was never stopped.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from inweave.training.output.log import Throughput

WINDOW = 100  # steps


class Progress:
    """``losses``: those that were read, since the run started or resumed; the others are still on the device."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._unread: list[torch.Tensor] = []
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def add(self, loss: torch.Tensor) -> None:
        self._unread.append(loss.clone())

    def read(self) -> None:
        """Move the losses to the host, which makes it wait."""
        losses: list[float] = torch.stack(self._unread).tolist() if self._unread else []
        self._unread.clear()
        self.losses += losses
        self._recent.extend(losses)

    @property
    def recent(self) -> list[float]:
        """The last losses, for a checkpoint."""
        self.read()
        return list(self._recent)

    def load(self, recent: Iterable[float]) -> None:
        self._recent = deque(map(float, recent), WINDOW)

    @property
    def average(self) -> float:
        self.read()
        finite = [loss for loss in self._recent if math.isfinite(loss)]
        return math.fsum(finite) / len(finite) if finite else math.nan

    def record(self, number: int, total: int, throughput: Throughput, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The line of the log after step ``number``; ``figures``: what else there is to say about it."""
        average = self.average
        speed, eta = throughput.at(number)
        return {
            "step": number, "total": total, "loss": self._recent[-1], "loss_average": average, "steps_per_second": speed,
            "eta": eta, **figures, "time": time.time(),
        }  # fmt: skip
