"""A plain linear layer and its LoRAs as one operation: the formula of `LoraLayer` without its intermediate results.

    y = x W^T + b + c S up^T,  S = x down^T          c = strength * scale          `inweave.ops.linear`

    several LoRAs   their ranks side by side:  down = [down_1; down_2; ...],  up = [c_1 up_1, c_2 up_2, ...],  c = 1

Only where nothing else may happen: torch's own forward of nn.Linear without hooks, a frozen weight of the input's dtype,
LoRA without Tucker core, blocks, magnitude and acting dropout, and no autocast. Everything else takes the general path.

In inference the stacked, rounded factors are kept until the adapters, their strengths or their values change. Values are
known by their version counters, which every in-place operation advances, but neither a write through `.data` nor a replayed
CUDA graph does. So nothing is kept for factors that are views of a larger buffer, and nothing once a layer has computed with
gradients: what is being trained is read again in every forward pass.

In a training step the factors are float32 and their rounded copies are all made at once, at its start (`Branch.rounded`).
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from inweave.layers.branch import Branch
from inweave.layers.lora import LoraBranch
from inweave.ops.kinds import LayerKind, LinearKind, registered_kind
from inweave.ops.linear import Rounded, lora_linear

#: kinds of devices whose linear layers are computed this way
DEVICES = frozenset({"cuda"})
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Stack(NamedTuple):
    """Rounded factors of all adapters that act on a layer, and what they were made from."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    source: list[tuple[torch.Tensor, int, int]]  # factor, address, version

    def is_of(self, factors: list[torch.Tensor], dtype: torch.dtype) -> bool:
        """Whether these factors, unchanged, are what it was made from."""
        return (self.down.dtype, len(self.source)) == (dtype, len(factors)) and all(
            factor is source and factor.data_ptr() == address and factor._version == version
            for factor, (source, address, version) in zip(factors, self.source, strict=True)
        )


def is_plain_linear(base: nn.Module, kind: LayerKind) -> bool:
    """Whether the module computes x W^T + b and nothing else, as far as its class says."""
    return (
        type(kind) is LinearKind
        and not kind.transposed
        and registered_kind(base) is None
        and type(base).forward is nn.Linear.forward
    )


class FusedLinear:
    """The operation for one module and whatever adapters act on it; ``stack``: what is kept of them for inference."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self.stack: Stack | None = None
        self.may_train = False  # it has computed with gradients

    def output(self, x: torch.Tensor, acting: tuple[tuple[Branch, float], ...], training: bool) -> torch.Tensor | None:
        """The layer's output; None where the general path has to be taken. At least one adapter acts."""
        if x.device.type not in DEVICES:
            return None
        if torch.is_grad_enabled():
            self.may_train = True  # not read before: a compiled block would be compiled again for the other value
        weight, bias = self.base._parameters.get("weight"), self.base._parameters.get("bias")
        if not _unchanged(self.base) or x.dtype not in DTYPES or torch.is_autocast_enabled(x.device.type):
            return None
        for parameter in (weight, bias):
            if parameter is not None and (
                type(parameter) is not nn.Parameter or parameter.dtype != x.dtype or parameter.requires_grad
            ):
                return None
        for branch, _ in acting:
            if not _is_plain_lora(branch, training):
                return None
        loras = cast("tuple[tuple[LoraBranch, float], ...]", acting)
        if weight is None:
            return self._added(x, loras)
        if torch.is_grad_enabled():
            return _with_gradients(x, weight, bias, loras)
        down, up, scale = self._inference_factors(x, loras)
        rows = x.reshape(-1, x.shape[-1])
        y = functional.linear(rows, weight, bias)
        return y.addmm_(functional.linear(rows, down), up.T, alpha=scale).view(*x.shape[:-1], y.shape[-1])

    def _added(self, x: torch.Tensor, acting: tuple[tuple[LoraBranch, float], ...]) -> torch.Tensor | None:
        """On a layer that was quantized since (`inweave.ops.fp8`): its own output, and the LoRAs added in place, by a product.

        Not where a compiler fuses the addition with what follows, or where selective checkpointing has stored that output.
        """
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            return None
        rows = x.reshape(-1, x.shape[-1])
        down, up, scale = _stacked(acting)
        y: torch.Tensor = self.base(rows)
        hidden = functional.linear(rows, down.to(x.dtype))
        return y.addmm_(hidden, up.to(x.dtype).T, alpha=scale).view(*x.shape[:-1], y.shape[-1])

    def _inference_factors(
        self, x: torch.Tensor, acting: tuple[tuple[LoraBranch, float], ...]
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """(down, up, scale) in the dtype of ``x``."""
        if len(acting) == 1:
            ((branch, strength),) = acting
            if branch.down.dtype == x.dtype and branch.up.dtype == x.dtype:
                return branch.down, branch.up, strength * branch.scale
            down_copy, up_copy = _copies(branch, x.dtype)
            if down_copy is not None and up_copy is not None:
                return down_copy.values, up_copy.values, strength * branch.scale
        if torch.compiler.is_compiling() or self.may_train or not all(map(_has_versions, acting)):
            self.stack = None
            down, up, scale = _stacked(acting)
            return down.to(x.dtype), up.to(x.dtype), scale
        factors: list[torch.Tensor] = [factor for branch, _ in acting for factor in (branch.down, branch.up)]
        if self.stack is None or not self.stack.is_of(factors, x.dtype):
            down, up, scale = _stacked(acting)
            source = [(factor, factor.data_ptr(), factor._version) for factor in factors]
            # copies: where nothing is rounded, a stack of one would hold the parameter itself
            self.stack = Stack(down.to(x.dtype, copy=True), up.to(x.dtype, copy=True), scale, source)
        return self.stack.down, self.stack.up, self.stack.scale


def _with_gradients(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, acting: tuple[tuple[LoraBranch, float], ...]
) -> torch.Tensor:
    if len(acting) > 1:
        return lora_linear(x, weight, bias, *_stacked(acting))
    ((branch, strength),) = acting
    down_copy, up_copy = _copies(branch, x.dtype)
    return lora_linear(
        x, weight, bias, branch.down, branch.up, strength * branch.scale, rounded_down=down_copy, rounded_up=up_copy
    )


def _copies(branch: LoraBranch, dtype: torch.dtype) -> tuple[Rounded | None, Rounded | None]:
    down, up = branch.rounded.get("down"), branch.rounded.get("up")
    return (
        None if down is None or down.values.dtype != dtype else down,
        None if up is None or up.values.dtype != dtype else up,
    )


def _unchanged(base: nn.Module) -> bool:
    """Whether calling the module does what its class says."""
    hooks = base._forward_hooks or base._forward_pre_hooks or base._backward_hooks or base._backward_pre_hooks
    return not hooks and "forward" not in base.__dict__


def _is_plain_lora(branch: Branch, training: bool) -> bool:
    return (
        type(branch) is LoraBranch
        and branch.magnitude is None
        and branch.mid is None
        and branch.up.shape[1] == branch.down.shape[0]
        and not (training and branch.dropout)
    )


def _stacked(acting: tuple[tuple[LoraBranch, float], ...]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The factors side by side, in the widest dtype that they have, with a gradient."""
    if len(acting) == 1:
        ((branch, strength),) = acting
        return branch.down, branch.up, strength * branch.scale
    down = torch.cat([branch.down for branch, _ in acting])
    ups = [branch.up.to(torch.promote_types(branch.up.dtype, torch.float32)) for branch, _ in acting]
    factors = [strength * branch.scale for branch, strength in acting]
    return down, torch.cat([up * factor for up, factor in zip(ups, factors, strict=True)], 1), 1.0


def _has_versions(entry: tuple[LoraBranch, float]) -> bool:
    """Whether every change of the factors can be seen: see the module's docstring."""
    return not any(
        factor.is_inference() or factor.untyped_storage().nbytes() != factor.numel() * factor.itemsize
        for factor in (entry[0].down, entry[0].up)
    )
