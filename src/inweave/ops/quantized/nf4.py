"""Weights in 4 bits: NF4, the code book of QLoRA (arXiv 2305.14314) and bitsandbytes, with scales in 8 bits.

    W_ij ~ BOOK[code_ij] * scale        one scale for 64 inputs of a row, the largest of them in magnitude
    scale = D[number] * row scale       D: the 256 values of the unsigned dynamic tree, of which 1 is the largest

BOOK holds 16 values that divide a normal distribution into parts of equal probability, including 0, 1 and -1. A byte
holds two codes, the first one in its upper half, as in bitsandbytes. Each code is the one nearest to W / scale, where
scale is already rounded to 8 bits: so rounding the scales adds little error, and quantizing a dequantized weight again
finds the same scales.

bitsandbytes subtracts the mean of the scales first: it reads this layout as `nested_offset` 0 and its own
`nested_quant_map`, and its files are read by `inweave.weights.packed`.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from inweave.ops.adam8bit.reference import code_book, middles
from inweave.ops.quantized.base import SMALLEST
from inweave.ops.quantized.dequantizing import Dequantizing, DequantizingLinear

BLOCK = 64
BOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class _Tensors(NamedTuple):
    codes: Tensor
    scales: Tensor
    row_scales: Tensor


class Nf4Weight(Dequantizing, _Tensors):
    """A weight (out, in): codes (out, in / 2) and scales (out, in / 64) in bytes, float32 row scales (out, 1)."""

    __slots__ = ()

    @classmethod
    def of(cls, weight: Tensor) -> Nf4Weight:
        """Quantize a matrix whose rows are a multiple of `BLOCK`."""
        blocks = weight.float().view(len(weight), -1, BLOCK)
        largest = blocks.abs().amax(2)
        largest = largest.masked_fill(largest < SMALLEST, 0.0)
        row_scales = largest.amax(1, keepdim=True)
        relative = largest / row_scales.clamp_min(SMALLEST)
        scales = torch.bucketize(relative, middles(False, weight.device), out_int32=True).to(torch.uint8)
        stored = _scale_values(scales, row_scales).unsqueeze(2)
        quotients = torch.where(stored > 0, blocks / stored.clamp_min(SMALLEST), 0.0)
        codes = torch.bucketize(quotients, _middles(weight.device), out_int32=True).to(torch.uint8).flatten(1)
        return cls(codes[:, ::2] << 4 | codes[:, 1::2], scales, row_scales)

    def format(self) -> str:
        """Return the format's name."""
        return "nf4"

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return (out, in)."""
        values = book(self.codes.device)[unpacked(self.codes).int()].view(*self.scales.shape, BLOCK)
        return (values * _scale_values(self.scales, self.row_scales).unsqueeze(2)).flatten(1).to(dtype)


def unpacked(codes: Tensor) -> Tensor:
    """Return two codes for each byte along the last axis, that of the upper half first."""
    return torch.stack([codes >> 4, codes & 15], -1).flatten(-2)


@cache
def book(device: torch.device) -> Tensor:
    """Return `BOOK` in float32."""
    return torch.tensor(BOOK, dtype=torch.float32, device=device)


@cache
def _middles(device: torch.device) -> Tensor:
    values = torch.tensor(BOOK, dtype=torch.float64)
    return ((values[1:] + values[:-1]) / 2).float().to(device)


def _scale_values(scales: Tensor, row_scales: Tensor) -> Tensor:
    return code_book(False, scales.device)[scales.int()] * row_scales


class Nf4Linear(DequantizingLinear):
    """A linear layer with an NF4 weight."""

    weights: ClassVar[type[Nf4Weight]] = Nf4Weight
    bytes_per_parameter: ClassVar[float] = 0.5 + 1 / BLOCK
    scratch_per_parameter: ClassVar[float] = 10
    MULTIPLE = BLOCK
