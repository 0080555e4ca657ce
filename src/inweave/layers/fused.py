"""A plain linear layer and its LoRAs as one operation: the formula of `LoraLayer` without intermediate results.

    y = x W^T + b + c S up^T,  S = x down^T          c = strength * scale          `inweave.ops.linear`

    several LoRAs   concatenated along the rank:
                    down = [down_1; down_2; ...],  up = [c_1 up_1 / c, c_2 up_2 / c, ...],  c = max |c_i|
                    because  c_i up_i  underflows in float16 if an alpha is a small fraction of its rank

Conditions: torch's own forward of nn.Linear without hooks, a frozen weight of the input's dtype, LoRA without Tucker
core, blocks, magnitude or active dropout, and no autocast. Everything else takes the general path.

In inference the checked state is cached between forward passes (`inweave.layers.plan`).

In a training step the factors are float32, and all rounded copies are made together at its start (`Branch.rounded`).
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from inweave.layers.branch import Branch
from inweave.layers.lora import LoraBranch
from inweave.layers.plan import Acting, InferencePlan, may_be_kept, product, source_of
from inweave.ops.common.modules import is_unchanged
from inweave.ops.common.select import is_nvidia
from inweave.ops.kinds import LayerKind, LinearKind, registered_kind
from inweave.ops.linear import Rounded, Weight, lora_linear
from inweave.ops.quantized import QuantizedLinear

#: device types whose linear layers are computed this way
DEVICES = frozenset({"cuda"} if is_nvidia(torch.device("cuda")) else ())
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Loras = tuple[tuple[LoraBranch, float], ...]


class Operation(Protocol):
    """What computes a layer with acting adapters."""

    def output(self, x: torch.Tensor, acting: Acting, training: bool) -> torch.Tensor | None:
        """Return the layer's output, or None to take the general path. At least one adapter acts."""
        ...


def is_plain_linear(base: nn.Module, kind: LayerKind) -> bool:
    """Return whether the module's class computes exactly x W^T + b."""
    return (
        type(kind) is LinearKind
        and not kind.transposed
        and registered_kind(base) is None
        and type(base).forward in (nn.Linear.forward, QuantizedLinear.forward)
    )


class FusedLinear:
    """The operation for one module and its acting adapters; ``plan`` caches their state for inference."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self.plan: InferencePlan | None = None
        self.may_train = False  # whether it has ever computed with gradients

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "plan": None}  # a copy of the layer has other parameters

    def output(self, x: torch.Tensor, acting: Acting, training: bool) -> torch.Tensor | None:
        """Return the layer's output, or None to take the general path. At least one adapter acts."""
        # compiled code must not read the plan or may_train: their changes would trigger recompilation
        gradients = torch.is_grad_enabled()
        if not gradients and not is_compiling():
            plan = self.plan
            if plan is not None and plan.kinds is DEVICES and not (plan.are_copies and self.may_train):
                y = plan.output(x, acting, training)
                if y is not None:
                    return y
        kind, dtype = x.device.type, x.dtype
        if kind not in DEVICES:
            return None
        if gradients:
            self.may_train = True
        base = self.base
        weight, bias = base._parameters.get("weight"), base._parameters.get("bias")
        if (
            dtype not in DTYPES
            or not is_unchanged(base)
            or not is_frozen(weight, dtype)
            or not is_frozen(bias, dtype)
            or torch.is_autocast_enabled(kind)
        ):
            return None
        for branch, _ in acting:
            if not is_plain_lora(branch, training):
                return None
        loras = cast("Loras", acting)
        if weight is None:
            if gradients and isinstance(base, QuantizedLinear):
                return _with_gradients(x, base.quantized, bias, loras)
            return self._added(x, loras)
        if gradients:
            return _with_gradients(x, weight, bias, loras)
        down, up, scale = _inference_factors(loras, dtype)
        if not is_compiling():
            self.plan = self._new_plan(x, loras, down, up, scale)
        return product(x, weight, bias, down.t(), up.t(), scale)

    def _new_plan(
        self, x: torch.Tensor, acting: Loras, down: torch.Tensor, up: torch.Tensor, scale: float
    ) -> InferencePlan | None:
        """Return a plan for the next passes from the tensors of this one, or None if they must not be cached."""
        are_copies = down is not acting[0][0].down or up is not acting[0][0].up
        factors = [factor for branch, _ in acting for factor in (branch.down, branch.up)]
        if (are_copies and self.may_train) or any(branch.rounded for branch, _ in acting):
            return None
        if not may_be_kept(factors, are_copies):
            return None
        parameters = self.base._parameters
        return InferencePlan(
            base=self.base.__dict__,
            weight=cast("nn.Parameter", parameters["weight"]),
            bias=parameters.get("bias"),
            acting=acting,
            sources=tuple(source_of(branch) for branch, _ in acting),
            memory=tuple(factor.detach() for factor in factors),
            kinds=DEVICES,
            device=x.device,
            dtype=x.dtype,
            down=down.detach().t(),
            up=up.detach().t(),
            scale=scale,
            are_copies=are_copies,
        )

    def _added(self, x: torch.Tensor, acting: Loras) -> torch.Tensor | None:
        """Return the output of a layer quantized since injection, with the LoRAs added in place by a product.

        None while compiling, where the compiler fuses the addition with the operations that follow, and under
        selective checkpointing, which may have stored the layer's output. See `inweave.ops.quantized`.
        """
        if is_compiling() or is_in_torch_dispatch_mode():
            return None
        rows = x.reshape(-1, x.shape[-1])
        down, up, scale = _stacked(acting)
        y: torch.Tensor = self.base(rows)
        hidden = functional.linear(rows, down.to(x.dtype))
        return y.addmm_(hidden, up.to(x.dtype).T, alpha=scale).view(*x.shape[:-1], y.shape[-1])


def _inference_factors(acting: Loras, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return (down, up, scale) in this dtype; the factors of a single LoRA are not copied if they have it."""
    down, up, scale = _stacked(acting)
    if len(acting) == 1 and not (down.dtype is dtype and up.dtype is dtype):
        down_copy, up_copy = rounded_copies(acting[0][0], dtype)
        if down_copy is not None and up_copy is not None:
            return down_copy.values, up_copy.values, scale
    return down.to(dtype), up.to(dtype), scale


def _with_gradients(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, acting: Loras) -> torch.Tensor:
    if len(acting) > 1:
        return lora_linear(x, weight, bias, *_stacked(acting))
    ((branch, strength),) = acting
    down_copy, up_copy = rounded_copies(branch, x.dtype)
    return lora_linear(
        x, weight, bias, branch.down, branch.up, strength * branch.scale, rounded_down=down_copy, rounded_up=up_copy
    )


def rounded_copies(branch: LoraBranch, dtype: torch.dtype) -> tuple[Rounded | None, Rounded | None]:
    """Return the training step's copies of `down` and `up` in this dtype, None for each that does not exist."""
    down, up = branch.rounded.get("down"), branch.rounded.get("up")
    return (
        None if down is None or down.values.dtype != dtype else down,
        None if up is None or up.values.dtype != dtype else up,
    )


def is_frozen(parameter: nn.Parameter | None, dtype: torch.dtype) -> bool:
    """Return whether the parameter is None, or a plain parameter of this dtype that requires no gradient."""
    return parameter is None or (
        type(parameter) is nn.Parameter and parameter.dtype is dtype and not parameter.requires_grad
    )


def is_plain_lora(branch: Branch, training: bool) -> bool:
    """Return whether the branch adds exactly  scale * up(down(x)), with parameters that no hook has to load."""
    if type(branch) is not LoraBranch or (training and branch.drops) or not is_unchanged(branch):
        return False
    roles = branch._parameters
    down, up = roles["down"], roles["up"]
    return (
        roles["magnitude"] is None
        and roles["mid"] is None
        and down is not None
        and up is not None
        and up.shape[1] == down.shape[0]
    )


def _scales(acting: Loras) -> list[float]:
    return [strength * branch.scale for branch, strength in acting]


def _stacked(acting: Loras) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the factors concatenated along the rank, in the widest of their dtypes, differentiable."""
    if len(acting) == 1:
        ((branch, strength),) = acting
        return branch.down, branch.up, strength * branch.scale
    down = torch.cat([branch.down for branch, _ in acting])
    ups = [branch.up.to(torch.promote_types(branch.up.dtype, torch.float32)) for branch, _ in acting]
    scales = _scales(acting)
    largest = max(map(abs, scales)) or 1.0
    return down, torch.cat([up * (scale / largest) for up, scale in zip(ups, scales, strict=True)], 1), largest
