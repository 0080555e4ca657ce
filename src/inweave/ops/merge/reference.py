"""The grouped merge, and its definition in plain torch: one weight after the other, one addmm per weight.

    out[rows, columns] = round(base[rows, columns] + sum_i scale_i * up_i @ down_i)

`base` and `out` are contiguous matrices of one dtype (they may be the same storage); `up_i` (rows, r_i) and `down_i`
(r_i, columns) are contiguous matrices of one dtype, on the same device. Sums are float32, rounded once. Here the
products of a weight are joined along the rank, [s1*up1 s2*up2 ..] @ [down1; down2; ..], so a stack of any height costs
one matrix product and one rounding.

Results beyond `limit_of` their dtype are reported. The limit is the largest number whose square is finite: with larger
weights, queries times keys are infinite. Half precision and eight bits have no such room; their limit is the largest
number, or the second largest in formats without infinity, where a result that is too large silently becomes the largest
number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: of formats without infinity
_SECOND_LARGEST = {torch.float8_e4m3fn: 416.0, torch.float8_e4m3fnuz: 224.0, torch.float8_e5m2fnuz: 49152.0}


def limit_of(dtype: torch.dtype) -> float:
    """Return the largest usable weight of a dtype."""
    if dtype in _SECOND_LARGEST:
        return _SECOND_LARGEST[dtype]
    largest = torch.finfo(dtype).max
    return largest if largest < 1e9 else math.sqrt(largest)


@dataclass(frozen=True, slots=True)
class Product:
    """One term of the sum: scale * up @ down."""

    up: Tensor
    down: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One weight, or some of its rows, and the products to add; without products, the base is restored."""

    base: Tensor
    out: Tensor
    products: tuple[Product, ...]


def merge_products(updates: Sequence[WeightUpdate]) -> list[int]:
    """Write the `out` of every update; return the indices of those with results beyond the limit."""
    unbounded = []
    for number, update in enumerate(updates):
        if update.products:
            up = torch.cat([product.up.float() * product.scale for product in update.products], 1)
            down = torch.cat([product.down.float() for product in update.products], 0)
            update.out.copy_(torch.addmm(update.base.float(), up, down))
        else:
            update.out.copy_(update.base)
        if not all_usable(update.out):
            unbounded.append(number)
    return unbounded


def all_usable(tensor: Tensor) -> bool:
    """Return whether every number of a tensor is finite and within the limit of its dtype; one pass, no memory."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(_comparable(tensor))
    limit = limit_of(tensor.dtype)
    return bool((low >= -limit) & (high <= limit))


def usable_numbers(tensor: Tensor) -> Tensor:
    """Return a mask of the numbers that are not NaN and within the limit of the dtype."""
    return _comparable(tensor).abs() <= limit_of(tensor.dtype)


def _comparable(tensor: Tensor) -> Tensor:
    """Return 8-bit floats as float32, since torch has no arithmetic for them."""
    return tensor.detach() if tensor.dtype.itemsize > 1 else tensor.detach().float()
