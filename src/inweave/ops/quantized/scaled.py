"""Weights in 8 bits as files store them: numbers of any 8-bit type, and one scale per row or per 128 inputs of a row.

    W = number * scale        F8_E4M3, F8_E5M2 or I8; a scale of the whole weight is repeated for its rows, one of a
                              block of 128 x 128 for the rows of the block; a plain F8 weight has the scale 1

Other numbers in this layout have the numbers' type, and new scales: the largest of what shares one.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from inweave.ops.quantized.base import SMALLEST, coarse
from inweave.ops.quantized.dequantizing import Dequantizing, PackedLinear, in_pieces

BLOCK = 128


class _Tensors(NamedTuple):
    numbers: Tensor
    scales: Tensor


class ScaledWeight(Dequantizing, _Tensors):
    """A weight (out, in) in 8 bits, with float32 scales (out, 1) or (out, in / 128)."""

    __slots__ = ()

    @classmethod
    def of(cls, weight: Tensor) -> ScaledWeight:
        """Quantize a matrix to e4m3 with row scales."""
        numbers = weight.new_empty(0, dtype=torch.float8_e4m3fn)
        return cls(numbers, weight.new_empty(0, 1)).like(weight)

    def like(self, matrix: Tensor) -> ScaledWeight:
        """Return a matrix in this layout."""
        wide, count = matrix.float(), self.scales.shape[1]
        dtype = self.numbers.dtype
        limit = torch.finfo(dtype).max if dtype.is_floating_point else 127
        blocks = functional.pad(wide, (0, count * BLOCK - wide.shape[1])).view(len(wide), count, BLOCK)
        largest = (wide.unsqueeze(1) if count == 1 else blocks).abs().amax(2)
        scales = coarse(largest.clamp_min(SMALLEST) / limit)
        numbers = (wide / _repeated(scales, wide.shape[1])).clamp(-limit, limit)
        return ScaledWeight((numbers if dtype.is_floating_point else numbers.round()).to(dtype), scales)

    def format(self) -> str:
        """Return the format's name."""
        return "scaled"

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return (out, in)."""
        numbers, scales = self
        out, into = numbers.shape

        def rows(part: slice) -> Tensor:
            return numbers[part].float() * _repeated(scales[part], into)

        return in_pieces((out, into), dtype, numbers.device, rows)


def _repeated(scales: Tensor, into: int) -> Tensor:
    """Return the scale of every input, or of all of them."""
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(BLOCK, 1)[:, :into]


class ScaledLinear(PackedLinear):
    """A linear layer with such a weight."""

    weights: ClassVar[type[ScaledWeight]] = ScaledWeight
