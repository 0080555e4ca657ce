"""The work of a grouped merge, the same for the reference and the kernel.

    out[rows, columns] = round(base[rows, columns] + sum_i scale_i * up_i @ down_i)

`base` and `out` are contiguous matrices of one dtype (they may be the same storage); `up_i` (rows, r_i) and
`down_i` (r_i, columns) are contiguous matrices of one dtype, on the same device. Sums are float32, rounded once.

Results beyond `limit_of` their dtype are reported. It is the largest number whose square is still finite: with weights
beyond it, queries times keys are infinite. Half precision and eight bits leave no such room; there it is the largest number,
or the one before it in formats without infinity: what is too large becomes the largest number there, without a trace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

#: of formats without infinity
_LARGEST_BUT_ONE = {torch.float8_e4m3fn: 416.0, torch.float8_e4m3fnuz: 224.0, torch.float8_e5m2fnuz: 49152.0}


def limit_of(dtype: torch.dtype) -> float:
    """The largest weight that can be computed with."""
    if dtype in _LARGEST_BUT_ONE:
        return _LARGEST_BUT_ONE[dtype]
    largest = torch.finfo(dtype).max
    return largest if largest < 1e9 else math.sqrt(largest)


@dataclass(frozen=True, slots=True)
class Product:
    up: torch.Tensor
    down: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Target:
    """One weight, or some rows of it, and what it receives; no products means: restore the base."""

    base: torch.Tensor
    out: torch.Tensor
    products: tuple[Product, ...]
