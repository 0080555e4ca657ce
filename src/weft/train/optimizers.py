"""Optimizers over flat parameters, behind one protocol.

    AdamW      m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  g = grad_scale * grad
               x = (1 - lr weight_decay) x - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
    AdamW8bit  the same, m and v in 8 bits: `weft.ops.adam8bit`

lr is the given one times the multiplier of the parameter. A step of these two is a function of tensors at fixed
addresses: no number comes to the host, so it can be captured in a CUDA graph after one ordinary step. Where ok is 0,
values, moments and counter keep their bits, whatever the gradients hold.

`prodigy`, `schedulefree` and `adafactor` are other people's optimizers on views of the same buffers (`libraries`);
they read lr and ok on the host and change the gradients, and so cannot be captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from weft.errors import ConfigError
from weft.ops import adam8bit
from weft.train.flat import FlatParameters
from weft.train.scaling import ROWS, Ema, LossScaler, clip, pieces, restore

__all__ = ["NAMES", "AdamW", "AdamW8bit", "Ema", "LossScaler", "Optimizer", "clip", "make_optimizer"]

NAMES = ("adamw", "adamw8bit", "prodigy", "schedulefree", "adafactor")


class Optimizer(Protocol):
    def step(self, lr: torch.Tensor, grad_scale: torch.Tensor, ok: torch.Tensor) -> None:
        """Move the parameters along ``grad_scale * grads``; where ``ok`` is 0 nothing changes. All are 0-dim."""

    def state(self) -> dict[str, torch.Tensor]:
        """Everything but the parameters, as plain tensors (live ones: the next step changes them)."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue exactly where `state` was taken."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Inside the block the parameters are those to evaluate and to save; after it, those to train, bit for bit."""


class _Adam:
    """What both flat Adams share: settings, the counter and the rates."""

    def __init__(
        self, flat: FlatParameters, *, weight_decay: float, betas: tuple[float, float], epsilon: float
    ) -> None:
        self._flat = flat
        self._decay, self._betas, self._epsilon = weight_decay, betas, epsilon
        self._count = torch.zeros((), dtype=torch.int64, device=flat.values.device)
        self._own: dict[str, torch.Tensor] = {"count": self._count}

    def state(self) -> dict[str, torch.Tensor]:
        return {**self._own, "layout": self._flat.layout}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        restore(self.state(), state, type(self).__name__)

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()


class AdamW(_Adam):
    """float32 moments, plain torch."""

    def __init__(
        self, flat: FlatParameters, *, weight_decay: float, betas: tuple[float, float], epsilon: float
    ) -> None:
        super().__init__(flat, weight_decay=weight_decay, betas=betas, epsilon=epsilon)
        self._m, self._v = torch.zeros_like(flat.values), torch.zeros_like(flat.values)
        self._own |= {"m": self._m, "v": self._v}
        rows = min(ROWS, flat.multipliers.numel())
        self._a, self._b = flat.values.new_empty(2, rows, adam8bit.BLOCK).unbind()

    @torch.no_grad()
    def step(self, lr: torch.Tensor, grad_scale: torch.Tensor, ok: torch.Tensor) -> None:
        flat, (beta1, beta2), taken = self._flat, self._betas, ok.bool()
        self._count.add_(taken)
        inverse1, inverse2 = adam8bit.corrections(self._count, beta1, beta2).unbind()
        rates = (lr * flat.multipliers)[:, None]
        # m / (sqrt(v) * i2 + epsilon) = m / (sqrt(v) + epsilon / i2) / i2: one pass less
        epsilon, scaled, kept = self._epsilon / inverse2, rates * (inverse1 / inverse2), 1 - rates * self._decay
        columns = zip(torch.split(scaled, ROWS), torch.split(kept, ROWS), strict=True)
        buffers = pieces(flat.values, flat.grads, self._m, self._v)
        for (x, grad, m, v), (rate, keep) in zip(buffers, columns, strict=True):
            a, b = self._a[: len(x)], self._b[: len(x)]
            torch.mul(grad, grad_scale, out=a)
            torch.lerp(m, a, 1 - beta1, out=b)
            torch.where(taken, b, m, out=m)
            torch.mul(v, beta2, out=b).addcmul_(a, a, value=1 - beta2)
            torch.where(taken, b, v, out=v)
            torch.sqrt(v, out=b).add_(epsilon)
            torch.div(m, b, out=b)
            moved = torch.mul(x, keep, out=a) if self._decay else x
            torch.addcmul(moved, b, rate, value=-1, out=a)
            torch.where(taken, a, x, out=x)


class AdamW8bit(_Adam):
    """Both moments in 8 bits, a quarter of float32's memory: one kernel on CUDA, plain torch elsewhere."""

    def __init__(
        self, flat: FlatParameters, *, weight_decay: float, betas: tuple[float, float], epsilon: float
    ) -> None:
        super().__init__(flat, weight_decay=weight_decay, betas=betas, epsilon=epsilon)
        self._moments = adam8bit.fresh(flat.values.numel(), flat.values.device)
        self._own |= dict(zip(("m_codes", "m_scales", "v_codes", "v_scales"), self._moments, strict=True))

    @torch.no_grad()
    def step(self, lr: torch.Tensor, grad_scale: torch.Tensor, ok: torch.Tensor) -> None:
        taken = ok.bool()
        self._count.add_(taken)
        adam8bit.step(
            self._flat.values,
            self._flat.grads,
            *self._moments,
            lr=lr if self._flat.uniform else lr * self._flat.multipliers,
            beta1=self._betas[0],
            beta2=self._betas[1],
            epsilon=self._epsilon,
            weight_decay=self._decay,
            count=self._count,
            ok=taken,
            grad_scale=grad_scale,
        )


def make_optimizer(
    name: str,
    flat: FlatParameters,
    *,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    args: Mapping[str, Any] | None = None,
) -> Optimizer:
    """The optimizer called ``name``; ``args`` are further options of a library's own.

    Adafactor has neither betas nor Adam's epsilon: it takes ``weight_decay`` and ``args`` alone.
    """
    args = dict(args or {})
    problems = [] if name in NAMES else [f"there is no optimizer {name!r}; choose one of {', '.join(NAMES)}"]
    problems += [f"weight_decay must be 0 or more, got {weight_decay!r}"] * (not weight_decay >= 0)
    problems += [f"betas must lie in [0, 1), got {betas!r}"] * (not all(0 <= beta < 1 for beta in betas))
    problems += [f"epsilon must be a positive number, got {epsilon!r}"] * (not epsilon > 0)
    if name in ("adamw", "adamw8bit") and args:
        problems.append(f"{name} has no option {sorted(args)[0]!r}: weight_decay, betas and epsilon are all it takes")
    if problems:
        raise ConfigError(problems)
    if name in ("adamw", "adamw8bit"):
        kind = AdamW if name == "adamw" else AdamW8bit
        return kind(flat, weight_decay=weight_decay, betas=betas, epsilon=epsilon)
    from weft.train import libraries

    settings = {"weight_decay": weight_decay, **args}
    if name != "adafactor":
        settings = {"betas": betas, "eps": epsilon, **settings}
    return libraries.make(name, flat, settings)
