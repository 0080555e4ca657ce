"""What happens to gradients before a step and to values after it, without a number coming to the host.

clip        norm = |grads| / loss_scale;  ok = norm is finite;  grad_scale = min(1, max_norm / norm) / loss_scale
LossScaler  scale * 2 after 2000 good steps in a row, scale / 2 after a bad one, within 1 .. 2^24
Ema         shadow = decay * shadow + (1 - decay) * values, after good steps only
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from inweave.errors import ConfigError, FormatError
from inweave.ops.adam8bit import BLOCK
from inweave.training.optim.flat import FlatParameters, fits

#: rows of 256 values that temporaries hold at once: 16 MiB of float32, which stays in a large GPU's L2 cache
ROWS = 1 << 14


def pieces(*flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same rows of some flat buffers, as matrices of 256 columns, a few megabytes at a time."""
    return zip(*(torch.split(tensor.view(-1, BLOCK), ROWS) for tensor in flat), strict=True)


@torch.no_grad()
def clip(
    grads: torch.Tensor, max_norm: float | None, loss_scale: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(grad_scale, ok, norm), all 0-dim on the gradients' device; the gradients themselves are left alone.

    ``norm`` is that of the unscaled gradients. Without a ``max_norm`` nothing is clipped. Where ok is False,
    grad_scale means nothing.
    """
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_norm must be a positive number, got {max_norm!r}; leave it out to clip nothing")
    norm = torch.linalg.vector_norm(grads) / loss_scale
    share = torch.ones_like(norm) if max_norm is None else (max_norm / norm).clamp(max=1.0)
    return share / loss_scale, norm.isfinite(), norm


class LossScaler:
    """The factor that keeps float16 gradients from vanishing: multiply the loss with `scale`, give it to `clip`."""

    def __init__(
        self, device: torch.device | str, *, initial: float = 65536.0, interval: int = 2000, largest: float = 2.0**24
    ) -> None:
        self._interval, self._largest = interval, largest
        self.scale = torch.tensor(float(initial), device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, ok: torch.Tensor) -> None:
        """After every step, taken or not."""
        taken = ok.bool()
        good = torch.where(taken, self.good + 1, 0)
        grown = good >= self._interval
        factor = torch.where(taken, torch.where(grown, 2.0, 1.0), 0.5)
        self.scale.mul_(factor).clamp_(1.0, self._largest)
        self.good.copy_(torch.where(grown, 0, good))
        self.skipped.add_(~taken)

    def state(self) -> dict[str, torch.Tensor]:
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        restore(self.state(), state, "the loss scale")


class Ema:
    """A moving average of the parameters, in one flat buffer of its own."""

    def __init__(self, flat: FlatParameters, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"the decay of a moving average must lie in [0, 1), got {decay!r}")
        self._flat, self._decay = flat, decay
        self.values = flat.values.clone()

    @torch.no_grad()
    def update(self, ok: torch.Tensor) -> None:
        """After every step; one that was not taken leaves the average bit for bit."""
        taken = ok.bool()
        for shadow, values in pieces(self.values, self._flat.values):
            torch.where(taken, torch.lerp(shadow, values, 1 - self._decay), shadow, out=shadow)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The parameters are the average inside the block, and have their own bits again after it."""
        with held(self._flat):
            self._flat.values.copy_(self.values)
            yield

    def state(self) -> dict[str, torch.Tensor]:
        """Live tensors: the next update changes them."""
        return {"ema": self.values, "layout": self._flat.layout}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        restore(self.state(), state, "the moving average")


@contextmanager
def held(flat: FlatParameters) -> Iterator[None]:
    """Whatever the block writes into the parameters, they have their bits back after it."""
    kept = flat.values.clone()
    try:
        yield
    finally:
        flat.values.copy_(kept)


@torch.no_grad()
def restore(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], what: str) -> None:
    """Copy a saved state over the live tensors of ``own``; all or nothing."""
    fits(saved, {name: tuple(tensor.shape) for name, tensor in own.items()}, what)
    if "layout" in own and not torch.equal(own["layout"], saved["layout"].cpu()):
        raise FormatError(f"{what}: the saved state belongs to other parameters (their names, shapes or order differ)")
    for name, tensor in own.items():
        if tensor.dtype != saved[name].dtype:
            raise FormatError(f"{what}: {name!r} is {tensor.dtype}, the saved state has {saved[name].dtype}")
    for name, tensor in own.items():
        tensor.copy_(saved[name])
