"""Gradient clipping and dynamic loss scaling, without reading a number on the host.

clip        norm = |grads| / loss_scale;  ok = norm is finite;  grad_scale = min(1, max_norm / norm) / loss_scale
            by value, before that: every element to -max_value .. max_value, in place; norm and ok are those before it
LossScaler  scale * 2 after 2000 finite steps in a row, scale / 2 after a skipped one, within 1 .. 2^24
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from inweave.errors import ConfigError
from inweave.training.optim.flat import restore


@torch.no_grad()
def clip(
    grads: torch.Tensor,
    max_norm: float | None,
    loss_scale: torch.Tensor | float = 1.0,
    max_value: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (grad_scale, ok, norm), all 0-dim on the gradients' device; only ``max_value`` changes the gradients.

    ``norm`` is that of the unscaled gradients. Without a ``max_norm`` nothing is clipped by it. If ok is False,
    grad_scale is undefined.
    """
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_norm must be a positive number, got {max_norm!r}; leave it out to clip nothing")
    norm = torch.linalg.vector_norm(grads) / loss_scale
    clipped = norm
    if max_value is not None:
        limit = torch.full_like(norm, max_value) * loss_scale
        grads.clamp_(-limit, limit)
        clipped = torch.linalg.vector_norm(grads) / loss_scale if max_norm is not None else norm
    factor = torch.ones_like(norm) if max_norm is None else (max_norm / clipped).clamp(max=1.0)
    return factor / loss_scale, norm.isfinite(), norm


class LossScaler:
    """The factor that keeps float16 gradients from underflowing: multiply the loss by `scale`, pass it to `clip`."""

    def __init__(
        self, device: torch.device | str, *, initial: float = 65536.0, interval: int = 2000, largest: float = 2.0**24
    ) -> None:
        self._interval, self._largest = interval, largest
        self.scale = torch.tensor(float(initial), device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, ok: torch.Tensor) -> None:
        """Update the scale after a step, skipped or not."""
        finite = ok.bool()
        good = torch.where(finite, self.good + 1, 0)
        grow = good >= self._interval
        factor = torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)
        self.scale.mul_(factor).clamp_(1.0, self._largest)
        self.good.copy_(torch.where(grow, 0, good))
        self.skipped.add_(~finite)

    def state(self) -> dict[str, torch.Tensor]:
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        restore(self.state(), state, "the loss scale")
