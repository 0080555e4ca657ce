"""Weights in 8-bit integers: one float32 scale per row, the inputs of a row rotated before or not.

    int8              W ~ N * scale                      N = round(W / scale), scale = max of the row / 127
    int8-hadamard     W ~ (N * scale) H                  N from W H; H is orthogonal, its own inverse

H is block-diagonal: Hadamard matrices over their size's root, of the largest of 256, 64, 16 and 4 inputs that divides
the row. A few outliers in a row spread over their block, so that the others keep more bits.

W H is computed by additions, and (N * scale) H as (N H') * (scale / root), H' = 1 and -1: its operands and sums are
whole numbers that every precision of a matrix product keeps (TF32, bfloat16), so the bits are the same everywhere.
"""

from __future__ import annotations

import math
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from inweave.ops.common.precision import without_autocast
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
        return (self.numbers * self.scales).to(dtype)


class RotatedInt8Weight(Int8Weight):
    """The same with rotated inputs."""

    __slots__ = ()

    @staticmethod
    def rotated(weight: Tensor) -> Tensor:
        """Return W H."""
        size = _block(weight.shape[1])
        result, half = weight.reshape(-1, size) / math.sqrt(size), size // 2
        while half:
            pairs = result.view(-1, 2, half)
            first, second = pairs[:, 0], pairs[:, 1]
            difference = first - second
            first += second
            second.copy_(difference)
            half //= 2
        return result.view(weight.shape)

    def format(self) -> str:
        """Return the format's name."""
        return "int8-hadamard"

    @without_autocast
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return (out, in)."""
        size = _block(self.numbers.shape[1])
        sums = self.numbers.view(-1, size).float() @ _hadamard(size, self.numbers.device)
        return (sums.view(self.numbers.shape) * (self.scales / math.sqrt(size))).to(dtype)


def _block(inputs: int) -> int:
    return next((size for size in _BLOCKS if inputs % size == 0), 1)


@cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """Return the Sylvester-Hadamard matrix H' of a power of 2."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


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
