"""Optimizers over flat parameters, behind one protocol.

    AdamW      m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  g = grad_scale * grad
               x = (1 - lr weight_decay) x - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
    AdamW8bit  the same, m and v in 8 bits: `inweave.ops.adam8bit`

lr is the scheduled rate times the parameter's multiplier. A step of these two is a function of tensors at fixed
addresses: no number is read by the host, so it can be captured in a CUDA graph after one ordinary step (`capturable`).
If ok is 0, values, moments and counter keep their bits, even if gradients are not finite.

All others are other libraries' optimizers on views of the same buffers (`third_party`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch.optim.adamw import adamw

from inweave.errors import ConfigError
from inweave.ops import adam8bit
from inweave.training.config.fields import OPTIMIZERS
from inweave.training.optim.flat import FlatParameters, restore


class Optimizer(Protocol):
    """Updates flat parameters in place.

    ``capturable``: whether a step can be captured in a CUDA graph; if not, ``capture_problem`` says why.
    """

    @property
    def capturable(self) -> bool: ...

    @property
    def capture_problem(self) -> str: ...

    def step(self, lr: torch.Tensor, grad_scale: torch.Tensor, ok: torch.Tensor) -> None:
        """Move the parameters along ``grad_scale * grads``; if ``ok`` is 0 nothing changes. All are 0-dim."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything but the parameters, as plain tensors (live ones: the next step changes them)."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what `state` returned, and continue exactly from there."""

    def eval_weights(self) -> AbstractContextManager[None]:
        """Switch to the parameters to evaluate and save inside the block; after it, training continues bit for bit."""


class _Adam(ABC):
    """The common part of both flat Adams: settings, the step counter and the saved state."""

    capturable: ClassVar[bool] = True
    capture_problem: ClassVar[str] = ""

    def __init__(
        self, flat: FlatParameters, *, weight_decay: float, betas: tuple[float, float], epsilon: float
    ) -> None:
        self._flat = flat
        self._decay, self._betas, self._epsilon = weight_decay, betas, epsilon
        self._count = torch.zeros((), dtype=torch.int64, device=flat.values.device)
        self._moments = self._new_moments(flat.values)

    def state(self) -> dict[str, torch.Tensor]:
        return {"count": self._count, **self._moments, "layout": self._flat.layout}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        restore(self.state(), state, type(self).__name__)

    def eval_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    @abstractmethod
    def _new_moments(self, values: torch.Tensor) -> dict[str, torch.Tensor]: ...


class AdamW(_Adam):
    """float32 moments: torch's fused kernel, one launch per multiplier; it leaves scaled gradients behind."""

    def _new_moments(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"m": torch.zeros_like(values), "v": torch.zeros_like(values)}

    @torch.no_grad()
    def step(self, lr: torch.Tensor, grad_scale: torch.Tensor, ok: torch.Tensor) -> None:
        found_inf, divisor = 1.0 - ok.float(), 1.0 / grad_scale.float()
        flat, (beta1, beta2) = self._flat, self._betas
        for place, multiplier in flat.runs:
            x, grad, m, v = ([each[place]] for each in (flat.values, flat.grads, *self._moments.values()))
            adamw(
                x, grad, m, v, [], [self._count.float()], fused=True, grad_scale=divisor, found_inf=found_inf,
                amsgrad=False, beta1=beta1, beta2=beta2, lr=lr * multiplier, weight_decay=self._decay,
                eps=self._epsilon, maximize=False,
            )  # fmt: skip
        self._count.add_(ok.bool())


class AdamW8bit(_Adam):
    """Both moments in 8 bits, a quarter of float32's memory: one kernel on CUDA, plain torch elsewhere."""

    def _new_moments(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        moments = adam8bit.fresh(values.numel(), values.device)
        return dict(zip(("m_codes", "m_scales", "v_codes", "v_scales"), moments, strict=True))

    @torch.no_grad()
    def step(self, lr: torch.Tensor, grad_scale: torch.Tensor, ok: torch.Tensor) -> None:
        finite, flat, (beta1, beta2) = ok.bool(), self._flat, self._betas
        self._count.add_(finite)
        adam8bit.step(
            flat.values, flat.grads, *self._moments.values(), lr=lr if flat.uniform else lr * flat.multipliers,
            beta1=beta1, beta2=beta2, epsilon=self._epsilon, weight_decay=self._decay, count=self._count, ok=finite,
            grad_scale=grad_scale,
        )  # fmt: skip


#: all others are from libraries (`inweave.training.optim.third_party`)
OWN_OPTIMIZERS: Mapping[str, type[AdamW | AdamW8bit]] = {"adamw": AdamW, "adamw8bit": AdamW8bit}


def make_optimizer(
    name: str,
    flat: FlatParameters,
    *,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    args: Mapping[str, Any] | None = None,
    learning_rate: float = 1.0,
) -> Optimizer:
    """Build the optimizer called ``name``; ``args`` are further options of a third-party one.

    ``learning_rate``: that of the configuration, which some libraries need at the start.
    """
    args = dict(args or {})
    problems = [] if name in OPTIMIZERS else [f"unknown optimizer {name!r}; choose one of {', '.join(OPTIMIZERS)}"]
    problems += [f"weight_decay must be 0 or more, got {weight_decay!r}"] * (not weight_decay >= 0)
    problems += [f"betas must lie in [0, 1), got {betas!r}"] * (not all(0 <= beta < 1 for beta in betas))
    problems += [f"epsilon must be a positive number, got {epsilon!r}"] * (not epsilon > 0)
    if name in OWN_OPTIMIZERS and args:
        problems.append(f"{name} has no option {sorted(args)[0]!r}: weight_decay, betas and epsilon are all it takes")
    if problems:
        raise ConfigError(problems)
    if name in OWN_OPTIMIZERS:
        return OWN_OPTIMIZERS[name](flat, weight_decay=weight_decay, betas=betas, epsilon=epsilon)
    from inweave.training.optim import third_party

    settings = {"lr": learning_rate, "betas": betas, "eps": epsilon, "weight_decay": weight_decay}
    if name == "adafactor" and args.pop("scale_parameter", True) is False:
        args["eps"] = (None, 1.0)  # a step is max(this, the parameter's RMS), and that of an adapter stays below 1
    return third_party.make(name, flat, settings, args)
