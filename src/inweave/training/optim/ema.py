"""An exponential moving average (EMA) of the trained parameters.

shadow = decay * shadow + (1 - decay) * values        after every step that was not skipped
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from inweave.errors import ConfigError
from inweave.training.optim.flat import FlatParameters, preserve_values, restore, row_chunks


class Ema:
    """The average, in one flat buffer of its own."""

    def __init__(self, flat: FlatParameters, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"ema_decay must lie in [0, 1), got {decay!r}")
        self._flat, self._decay = flat, decay
        self.values = flat.values.clone()

    @torch.no_grad()
    def update(self, ok: torch.Tensor) -> None:
        """Update the average after a step; a skipped step leaves it bit for bit."""
        for shadow, values in row_chunks(self.values, self._flat.values):
            torch.where(ok.bool(), torch.lerp(shadow, values, 1 - self._decay), shadow, out=shadow)

    @contextmanager
    def eval_weights(self) -> Iterator[None]:
        """Replace the parameters by the average inside the block, and restore their bits after it."""
        with preserve_values(self._flat):
            self._flat.values.copy_(self.values)
            yield

    def state(self) -> dict[str, torch.Tensor]:
        """Return the average as live tensors: the next update changes them."""
        return {"ema": self.values, "layout": self._flat.layout}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        restore(self.state(), state, "the EMA")
