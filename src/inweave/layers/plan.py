"""What a linear layer and its LoRAs compute with in inference, kept from one forward pass to the next.

    y = x W^T + b,  y += c (x down^T) up^T           `inweave.layers.fused`

A GPU waits for the hundreds of layers that are called one after the other, and what each of them asks costs as much as its
products. So a plan holds what an earlier pass has found: down^T and up^T, which are views of the factors of one LoRA, or copies
of what was stacked and rounded. Each pass asks whether all that they were found from is still the same, and nothing else:

    the call     gradients, autocast, dtype and device of x, an acting dropout
    the base     its weight and bias, whether they are frozen, hooks, a forward of its own
    the LoRAs    which they are and how strong, their parameters, and of down and up the address, the size and the version

A weight of another dtype or on another device needs no question: torch refuses the first product, as it does on the general path.
Every in-place operation advances a version, but neither a write through `.data` nor a replayed CUDA graph does. Views show such a
write. Copies would not, so none is kept of factors that are views of a larger buffer, of a layer that has computed with gradients
(what is being trained is read again in every pass), or while a CUDA graph is being recorded, which computes nothing yet.

The memory of the factors is held as long as the plan, so that no other tensor can come to lie at their address. A plan is dropped
when adapters change or the layer is moved, and a copy of the layer starts without one.
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
    """Of one layer: its base, its adapters, and their factors as they were."""

    base: dict[str, Any]  # the attributes of the module
    weight: nn.Parameter
    bias: nn.Parameter | None
    acting: Acting
    sources: tuple[Source, ...]
    memory: tuple[torch.Tensor, ...]  # of their factors
    kinds: frozenset[str]  # of devices that are computed this way
    device: torch.device
    dtype: torch.dtype
    down: torch.Tensor  # transposed, as is up
    up: torch.Tensor
    scale: float
    are_copies: bool

    def output(self, x: torch.Tensor, acting: Acting, training: bool) -> torch.Tensor | None:
        """The layer's output without gradients; None where the plan does not hold."""
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
    """Whether the tensors of this pass outlive it, and every change of the factors can be seen."""
    if is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        return False
    for factor in factors:
        if type(factor) is not nn.Parameter or (are_copies and (factor.is_inference() or _is_part(factor))):
            return False
    return not (are_copies and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def source_of(branch: LoraBranch) -> Source:
    """The adapter as it is now."""
    down, up = branch.down, branch.up
    versions = None if down.is_inference() or up.is_inference() else (down._version, up._version)
    return branch.__dict__, branch.scale, down, up, (down.data_ptr(), down.numel(), up.data_ptr(), up.numel()), versions


def _is_part(factor: torch.Tensor) -> bool:
    """Whether it is a view of a larger buffer."""
    return factor.untyped_storage().nbytes() != factor.numel() * factor.itemsize


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    """x W^T + b + scale (x down) up"""
    shape = x.shape
    axes = len(shape)
    rows = x if axes == 2 else x.reshape(-1, shape[-1])
    y = functional.linear(rows, weight, bias)
    y.addmm_(rows.mm(down), up, alpha=scale)
    if axes == 2:
        return y
    # slices of shapes are slow, and nearly all inputs have three axes
    return y.view(shape[0], shape[1], y.shape[1]) if axes == 3 else y.view(*shape[:-1], y.shape[1])
