"""Weights in 4 bits as bitsandbytes stores them (nf4 and fp4), with its own tables and scales.

    W = BOOK[code] * scale                          one scale for a block of inputs of a row, usually 64
    scale = MAP[byte] * outer + offset              if the scales are packed too (nested, or double quantization)

A byte holds two codes, the first one in its upper half. `tables` are BOOK (16) and, if nested, MAP (256) and the
offset (1). One outer scale is that of several consecutive blocks, of all rows: so their sizes are those of the tensors.

Other numbers in this layout have the largest of a block as its scale, and the code nearest to W / scale, where scale is
already rounded; the offset is the mean of the scales, as in bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from inweave.ops.quantized.base import SMALLEST
from inweave.ops.quantized.dequantizing import Dequantizing, PackedLinear, in_pieces
from inweave.ops.quantized.nf4 import BLOCK, book, unpacked


class _Tensors(NamedTuple):
    codes: Tensor
    scales: Tensor
    tables: Tensor
    outer: Tensor


class Bnb4Weight(Dequantizing, _Tensors):
    """A weight (out, in): codes (out, in / 2), scales (out, blocks) in bytes or float32, tables, outer scales."""

    __slots__ = ()

    @classmethod
    def of(cls, weight: Tensor) -> Bnb4Weight:
        """Quantize a matrix whose rows are a multiple of 64 to nf4 with plain scales."""
        scales = torch.zeros(len(weight), weight.shape[1] // BLOCK, device=weight.device, dtype=torch.float32)
        codes, tables = weight.new_empty(0, dtype=torch.uint8), book(weight.device)
        return cls(codes, scales, tables, tables[:0]).like(weight)

    def split(self, count: int) -> list[Bnb4Weight]:
        """Return the weight itself: outer scales are those of several rows."""
        if count > 1:
            raise ValueError("a weight of bitsandbytes is not split")
        return [self]

    @classmethod
    def joined(cls, parts: Sequence[Any]) -> Any:
        """Return the only weight; None for several."""
        return parts[0] if len(parts) == 1 else None

    def part(self, start: int, length: int) -> Bnb4Weight:
        """Return some rows as a weight of their own, with plain scales."""
        stop = start + length
        scales = self.block_scales()[start:stop]
        return Bnb4Weight(self.codes[start:stop], scales, self.tables[:16], self.tables[:0])

    def format(self) -> str:
        """Return the format's name."""
        return "bitsandbytes-4bit"

    def block_scales(self) -> Tensor:
        """Return the scales of all blocks, (out, blocks)."""
        if self.outer.numel() == 0:
            return self.scales.float()
        count = self.scales.numel() // self.outer.numel()
        inner = self.tables[16:272][self.scales.flatten().int()]
        return (inner * self.outer.repeat_interleave(count) + self.tables[272]).view(self.scales.shape)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return (out, in)."""
        codes, book, scales = self.codes, self.tables[:16], self.block_scales()
        into = codes.shape[1] * 2

        def rows(part: slice) -> Tensor:
            values = book[unpacked(codes[part]).int()].view(-1, scales.shape[1], into // scales.shape[1])
            return (values * scales[part].unsqueeze(2)).view(-1, into)

        return in_pieces((len(codes), into), dtype, codes.device, rows)

    def like(self, matrix: Tensor) -> Bnb4Weight:
        """Return a matrix in this layout."""
        blocks = matrix.float().view(*self.scales.shape, -1)
        new = self._with_scales(blocks.abs().amax(2))
        stored = new.block_scales().unsqueeze(2)
        quotients = torch.where(stored.abs() >= SMALLEST, blocks / stored, 0.0)
        codes = _nearest(self.tables[:16], quotients).view(len(matrix), -1)
        return new._replace(codes=codes[:, ::2] << 4 | codes[:, 1::2])

    def _with_scales(self, largest: Tensor) -> Bnb4Weight:
        if self.outer.numel() == 0:
            return self._replace(scales=largest.to(self.scales.dtype))
        offset = largest.mean()
        groups = (largest - offset).view(len(self.outer), -1)
        outer = groups.abs().amax(1)
        scales = _nearest(self.tables[16:272], groups / outer.clamp_min(SMALLEST).unsqueeze(1))
        tables = torch.cat([self.tables[:272], offset.view(1)])
        return self._replace(scales=scales.view(self.scales.shape), tables=tables, outer=outer)


def _nearest(table: Tensor, values: Tensor) -> Tensor:
    """Return the number of the entry nearest to each value, in a byte; a table need not be in order."""
    ordered, places = table.sort()
    nearest = torch.bucketize(values, (ordered[1:] + ordered[:-1]) / 2, out_int32=True)
    return places[nearest].to(torch.uint8)


class Bnb4Linear(PackedLinear):
    """A linear layer with such a weight."""

    weights: ClassVar[type[Bnb4Weight]] = Bnb4Weight
    bytes_per_parameter: ClassVar[float] = 0.5 + 1 / 64
