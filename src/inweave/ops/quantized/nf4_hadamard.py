"""Weights in 4.5 bits: rotated inputs, a code book fitted to what a rotation makes of them, a scale for 16 inputs.

    W H ~ BOOK[code] * scale                one scale for 16 inputs of a row, with a sign
    scale = D[number] * row scale           D: the 256 values of the signed dynamic tree, of which 1 is the largest

H is that of `int8`'s rotation: after it a block is nearly normal, whatever the weight is. A scale is minus the number
of the largest magnitude, so that this one is -1 and BOOK need not hold 1; the others are closer to 0. BOOK is the best
16 values for normal numbers (Lloyd's algorithm, weighted by the squares of the scales). A scale is multiplied by the
one of `_FACTORS` with the smallest error. Dequantizing adds and subtracts in the order of rotating, in float32.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from inweave.ops.adam8bit.reference import code_book, middles
from inweave.ops.quantized.base import SMALLEST, coarse
from inweave.ops.quantized.dequantizing import Dequantizing, DequantizingLinear, in_pieces
from inweave.ops.quantized.int8 import RotatedInt8Weight
from inweave.ops.quantized.nf4 import unpacked

BLOCK = 16
BOOK = (
    -1.0, -0.8095, -0.6516, -0.5156, -0.3953, -0.2838, -0.1796, -0.0768, 0.0266, 0.1286, 0.2325, 0.3422, 0.4582, 0.5855,
    0.7289, 0.8952,
)  # fmt: skip
_FACTORS = (1.0, 0.94, 0.88, 0.82, 0.76)  # at most 1: the number that a scale is made of stays the largest


class _Tensors(NamedTuple):
    codes: Tensor
    scales: Tensor
    row_scales: Tensor


class RotatedNf4Weight(Dequantizing, _Tensors):
    """A weight (out, in): codes (out, in / 2) and scales (out, in / 16) in bytes, float32 row scales (out, 1)."""

    __slots__ = ()

    @classmethod
    def of(cls, weight: Tensor) -> RotatedNf4Weight:
        """Quantize a matrix whose rows are a multiple of `BLOCK`."""
        blocks = RotatedInt8Weight.rotated(weight.float()).view(len(weight), -1, BLOCK)
        extreme = -blocks.gather(2, blocks.abs().argmax(2, keepdim=True)).squeeze(2)
        extreme = extreme.masked_fill(extreme.abs() < SMALLEST, 0.0)
        best, error = extreme, torch.full_like(extreme, torch.inf)
        for factor in _FACTORS:
            scales = extreme * factor
            rest = (blocks - _values(_codes(blocks, scales)) * scales.unsqueeze(2)).square().sum(2)
            best, error = torch.where(rest < error, scales, best), torch.minimum(rest, error)
        largest = best.gather(1, best.abs().argmax(1, keepdim=True))
        row_scales = coarse(largest.abs().clamp_min(SMALLEST)) * largest.sign()
        ratios = torch.where(row_scales != 0, best / row_scales, 0.0)
        numbers = torch.bucketize(ratios, middles(True, weight.device), out_int32=True).to(torch.uint8)
        codes = _codes(blocks, _scale_values(numbers, row_scales)).flatten(1)
        return cls(codes[:, ::2] << 4 | codes[:, 1::2], numbers, row_scales)

    def format(self) -> str:
        """Return the format's name."""
        return "nf4-hadamard"

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return (out, in)."""
        codes, numbers, row_scales = self
        into = codes.shape[1] * 2

        def rows(part: slice) -> Tensor:
            scales = _scale_values(numbers[part], row_scales[part]).unsqueeze(2)
            values = _values(unpacked(codes[part])).view(-1, numbers.shape[1], BLOCK)
            return RotatedInt8Weight.rotated((values * scales).view(-1, into))

        return in_pieces((len(codes), into), dtype, codes.device, rows)


def _codes(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the code nearest to each number over its scale."""
    wide = scales.unsqueeze(2)
    quotients = torch.where(wide != 0, blocks / wide, 0.0)
    return torch.bucketize(quotients, _book(blocks.device)[1], out_int32=True).to(torch.uint8)


def _values(codes: Tensor) -> Tensor:
    return _book(codes.device)[0][codes.int()]


def _scale_values(numbers: Tensor, row_scales: Tensor) -> Tensor:
    return code_book(True, numbers.device)[numbers.int()] * row_scales


@cache
def _book(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `BOOK` and the values between its numbers, in float32."""
    values = torch.tensor(BOOK, dtype=torch.float64)
    return values.float().to(device), ((values[1:] + values[:-1]) / 2).float().to(device)


class RotatedNf4Linear(DequantizingLinear):
    """A linear layer with such a weight."""

    weights: ClassVar[type[RotatedNf4Weight]] = RotatedNf4Weight
    bytes_per_parameter: ClassVar[float] = 0.5 + 1 / BLOCK
    scratch_per_parameter: ClassVar[float] = 4
    MULTIPLE = BLOCK
