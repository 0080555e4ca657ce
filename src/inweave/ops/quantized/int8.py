"""Weights in 8-bit integers: one float32 scale per row, the inputs of a row rotated before or not.

    int8              W ~ N * scale                      N = round(W / scale), scale = max of the row / 127
    int8-hadamard     W ~ (N * scale) H                  N from W H; H is orthogonal, its own inverse

H is block-diagonal: Hadamard matrices over their size's root, of the largest of 256, 64, 16 and 4 inputs that divides
the row. A few outliers in a row spread over their block, so that the others keep more bits.
"""

from __future__ import annotations

import math
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from inweave.ops.quantized.base import SMALLEST, coarse
from inweave.ops.quantized.dequantizing import Dequantizing, DequantizingLinear

_LARGEST = 127
_BLOCKS = (256, 64, 16, 4)  # powers of 4: their roots are exact


class _Tensors(NamedTuple):
    numbers: Tensor
    scales: Tensor


class Int8Weight(Dequantizing, _Tensors):
    """A weight (out, in) in int8, with float32 scales (out, 1)."""

    __slots__ = ()

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """Quantize a matrix."""
        wide = cls.rotated(weight.float())
        scales = coarse(wide.abs().amax(1, keepdim=True).clamp_min(SMALLEST) / _LARGEST)
        return cls((wide / scales).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales)

    @staticmethod
    def rotated(weight: Tensor) -> Tensor:
        """Return the matrix that is rounded."""
        return weight

    def format(self) -> str:
        """Return the format's name."""
        return "int8"

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return (out, in)."""
        return self.rotated(self.numbers * self.scales).to(dtype)


class RotatedInt8Weight(Int8Weight):
    """The same with rotated inputs."""

    __slots__ = ()

    @staticmethod
    def rotated(weight: Tensor) -> Tensor:
        """Return W H."""
        size = next((size for size in _BLOCKS if weight.shape[1] % size == 0), 1)
        return (weight.view(-1, size) @ _hadamard(size, weight.device)).view(weight.shape)

    def format(self) -> str:
        """Return the format's name."""
        return "int8-hadamard"


@cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """Return the Sylvester-Hadamard matrix of a power of 2, over the root of its size."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


class Int8Linear(DequantizingLinear):
    """A linear layer with an int8 weight."""

    weights: ClassVar[type[Int8Weight]] = Int8Weight
    bytes_per_parameter: ClassVar[float] = 1
    scratch_per_parameter: ClassVar[float] = 6


class RotatedInt8Linear(Int8Linear):
    """The same with rotated inputs."""

    weights: ClassVar[type[Int8Weight]] = RotatedInt8Weight
    scratch_per_parameter: ClassVar[float] = 10
    MULTIPLE = 4
