"""The grouped merge in plain torch: one weight after the other, one addmm per weight.

Products of a weight are joined along the rank, [s1*up1 s2*up2 ..] @ [down1; down2; ..], so a stack of any
height costs one matrix product and one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inweave.ops.merge.work import Target, limit_of


def merge_products(targets: Sequence[Target]) -> list[int]:
    """Write every target's `out`; returns the numbers of those with results beyond the limit."""
    unbounded = []
    for number, target in enumerate(targets):
        if target.products:
            up = torch.cat([product.up.float() * product.scale for product in target.products], 1)
            down = torch.cat([product.down.float() for product in target.products], 0)
            target.out.copy_(torch.addmm(target.base.float(), up, down))
        else:
            target.out.copy_(target.base)
        if not all_usable(target.out):
            unbounded.append(number)
    return unbounded


def all_usable(tensor: torch.Tensor) -> bool:
    """Whether no number of a tensor is NaN or beyond the limit of its dtype; one pass, no memory."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(_wide(tensor))
    limit = limit_of(tensor.dtype)
    return bool((low >= -limit) & (high <= limit))


def usable_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Which numbers of a tensor are neither NaN nor beyond the limit of its dtype."""
    return _wide(tensor).abs() <= limit_of(tensor.dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Eight-bit floats as float32: they have no arithmetic."""
    return tensor.detach() if tensor.dtype.itemsize > 1 else tensor.detach().float()
