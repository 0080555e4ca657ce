"""The losses of a run, and their running average.

    loss           of the step
    loss_average   the mean of the last 100 steps, or of all if there are fewer; losses that are not finite are left out

The loss of a step depends far more on its sampled timesteps than on what was learned, which the average shows. The last
100 losses are part of a checkpoint, so that a resumed run reports the average of a run that was never stopped.
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


class LossHistory:
    """``read``: the losses since the run started or resumed that were fetched; the others are still on the device."""

    def __init__(self) -> None:
        self.read: list[float] = []
        self._unread: list[torch.Tensor] = []
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def add(self, loss: torch.Tensor) -> None:
        self._unread.append(loss.clone())

    def fetch(self) -> None:
        """Move the losses to the host, which makes it wait."""
        losses: list[float] = torch.stack(self._unread).tolist() if self._unread else []
        self._unread.clear()
        self.read += losses
        self._recent.extend(losses)

    @property
    def recent(self) -> list[float]:
        """The last losses, for a checkpoint."""
        self.fetch()
        return list(self._recent)

    def load(self, recent: Iterable[float]) -> None:
        self._recent = deque(map(float, recent), WINDOW)

    @property
    def average(self) -> float:
        self.fetch()
        finite = [loss for loss in self._recent if math.isfinite(loss)]
        return math.fsum(finite) / len(finite) if finite else math.nan

    def record(self, number: int, total: int, throughput: Throughput, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of the log after step ``number``, with the other ``figures`` of the step."""
        average = self.average
        speed, eta = throughput.at(number)
        return {
            "step": number, "total": total, "loss": self._recent[-1], "loss_average": average,
            "steps_per_second": speed, "eta": eta, **figures, "time": time.time(),
        }  # fmt: skip
