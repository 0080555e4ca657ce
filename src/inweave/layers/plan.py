"""A cache of the tensors that a linear layer and its LoRAs use in inference, kept between forward passes.

    y = x W^T + b,  y += c (x down^T) up^T           `inweave.layers.fused`

Per-layer Python checks cost as much as the matmuls, so their results are cached between forward passes. A plan holds
down^T and up^T: views of the factors of a single LoRA, or copies if factors were concatenated or rounded. Each pass
only checks that the inputs of the plan are unchanged:

    the call     gradients, autocast, dtype and device of x, active dropout
    the base     its weight and bias, whether they are frozen, hooks, an overridden forward
    the LoRAs    which ones and their strengths, their parameters, and address, size and version of down and up

The weight's dtype and device are not checked: torch raises on a mismatch in the first matmul, as on the general path.
Every in-place operation advances a version, but a write through `.data` and a replayed CUDA graph do not. Views reflect
such a write and copies do not, so copies are not kept if the factors are views of a larger buffer, if the layer has
computed with gradients (factors in training are read in every pass), or during CUDA graph capture, when nothing is
computed yet.

A plan keeps the factors' memory alive, so that no other tensor can be allocated at their address. It is dropped when
adapters change or the layer is moved, and a copy of the layer starts without one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from inweave.layers.branch import Branch
from inweave.layers.lora import LoraBranch

Acting = tuple[tuple[Branch, float], ...]
#: of one adapter: its attributes and scale; down and up, and the addresses, sizes and versions of these
Source = tuple[dict[str, Any], float, nn.Parameter, nn.Parameter, tuple[int, ...], tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class InferencePlan:
    """The cached state of one layer: its base, its adapters, and their factors."""

    base: dict[str, Any]  # the attributes of the module
    weight: nn.Parameter
    bias: nn.Parameter | None
    acting: Acting
    sources: tuple[Source, ...]
    memory: tuple[torch.Tensor, ...]  # keeps the factors' memory alive
    kinds: frozenset[str]  # device types that are computed this way
    device: torch.device
    dtype: torch.dtype
    down: torch.Tensor  # transposed, as is up
    up: torch.Tensor
    scale: float
    are_copies: bool

    def output(self, x: torch.Tensor, acting: Acting, training: bool) -> torch.Tensor | None:
        """Return the layer's output without gradients, or None if the plan is out of date."""
        base = self.base
        parameters = base["_parameters"]
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if (
            acting is not self.acting
            or x.dtype is not self.dtype
            or x.device != self.device
            or weight is not self.weight
            or weight.requires_grad
            or bias is not self.bias
            or (bias is not None and bias.requires_grad)
            or base["_forward_hooks"]
            or base["_forward_pre_hooks"]
            or base["_backward_hooks"]
            or base["_backward_pre_hooks"]
            or "forward" in base
            or torch._C._is_any_autocast_enabled()
            or (training and any(branch.drops for branch, _ in acting))
        ):
            return None
        for branch, scale, down, up, places, versions in self.sources:
            roles = branch["_parameters"]
            if (
                roles["down"] is not down
                or roles["up"] is not up
                or roles["mid"] is not None
                or roles["magnitude"] is not None
                or branch["scale"] != scale
                or branch["rounded"]
                or (down.data_ptr(), down.numel(), up.data_ptr(), up.numel()) != places
                or (versions is not None and (down._version, up._version) != versions)
            ):
                return None
        return product(x, weight, bias, self.down, self.up, self.scale)


def may_be_kept(factors: Iterable[nn.Parameter], are_copies: bool) -> bool:
    """Return whether the tensors of this pass may be cached and every change of the factors can be detected."""
    if is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        return False
    for factor in factors:
        if type(factor) is not nn.Parameter or (are_copies and (factor.is_inference() or _is_part(factor))):
            return False
    return not (are_copies and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def source_of(branch: LoraBranch) -> Source:
    """Return the current state of the adapter."""
    down, up = branch.down, branch.up
    versions = None if down.is_inference() or up.is_inference() else (down._version, up._version)
    return branch.__dict__, branch.scale, down, up, (down.data_ptr(), down.numel(), up.data_ptr(), up.numel()), versions


def _is_part(factor: torch.Tensor) -> bool:
    """Return whether the factor is a view of a larger buffer."""
    return factor.untyped_storage().nbytes() != factor.numel() * factor.itemsize


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return x W^T + b + scale (x down) up."""
    shape = x.shape
    axes = len(shape)
    rows = x if axes == 2 else x.reshape(-1, shape[-1])
    y = functional.linear(rows, weight, bias)
    y.addmm_(rows.mm(down), up, alpha=scale)
    if axes == 2:
        return y
    # slicing shapes is slow, and nearly all inputs have three axes
    return y.view(shape[0], shape[1], y.shape[1]) if axes == 3 else y.view(*shape[:-1], y.shape[1])
