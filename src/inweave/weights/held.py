"""Weights that stay as a file stores them: the stored tensors as a weight of `inweave.ops.quantized`.

    scaled F8            `scaled`                     one scale, per row, or per block of 128 x 128; a plain F8 has 1
    scaled I8            `int8`, by blocks `scaled`
    bitsandbytes int8    `int8`                       scale = largest of the row / 127
    bitsandbytes 4 bit   `bitsandbytes-4bit`          if its blocks end with the rows
    GGUF                 `gguf-Q4_K`, ...

Dequantized, each has the bits that its source unpacks. A source offers them by a method `quantized`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from inweave.formats.packed import BLOCK, Packed, blocks_of
from inweave.ops.quantized import QuantizedWeight
from inweave.ops.quantized.bitsandbytes import Bnb4Weight
from inweave.ops.quantized.int8 import Int8Weight
from inweave.ops.quantized.scaled import ScaledWeight
from inweave.targets.plan import Rows

_WIDE = torch.float32


def quantized_weight(
    source: object, name: str, device: torch.device | str, rows: Rows | None = None
) -> QuantizedWeight | None:
    """Return a weight, or some of its rows, as the file stores it quantized; None if it is plain, or its layout is not
    one of `inweave.ops.quantized`. On the meta device nothing is read.
    """
    read = getattr(source, "quantized", None)
    weight: QuantizedWeight | None = None if read is None else read(name, device, rows)
    return weight


def unscaled(numbers: torch.Tensor) -> ScaledWeight:
    """Return plain numbers of 8 bits as a weight, a matrix of its outputs."""
    return ScaledWeight(numbers.flatten(1), torch.ones(len(numbers), 1, dtype=_WIDE, device=numbers.device))


def with_halves_swapped(weight: Any) -> QuantizedWeight | None:
    """Return a weight with the halves of its rows swapped; None if its tensors are not divided by rows."""
    if any(len(tensor) != len(weight[0]) for tensor in weight):
        return None
    swapped: QuantizedWeight = type(weight)(*(torch.cat(tensor.chunk(2)[::-1]) for tensor in weight))
    return swapped


def stored_weight(packed: Packed, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight | None:
    """Return the quantized weight, one row per output, without dequantizing it; None if no format has its layout."""
    numbers, shape = parts["numbers"], packed.shape
    rows, into = shape[0] if shape else 0, math.prod(shape[1:])
    if packed.kind == "bitsandbytes int8":
        return Int8Weight(numbers.flatten(1), parts["scales"].to(_WIDE).view(-1, 1) / 127)
    if packed.kind.startswith("bitsandbytes"):
        return _held_four_bits(packed, parts)
    scales = parts["scales"].to(_WIDE)
    if scales.numel() > 1 and scales.shape == blocks_of(shape):
        if len(shape) != 2:
            return None
        scales = scales.repeat_interleave(BLOCK, 0)[:rows]
        if scales.shape[1] == 1 and numbers.dtype == torch.int8:
            return Int8Weight(numbers, scales)
        return ScaledWeight(numbers, scales)
    scales = scales.view(-1, 1).expand(rows, 1).contiguous()
    numbers = numbers.view(rows, into)
    return Int8Weight(numbers, scales) if numbers.dtype == torch.int8 else ScaledWeight(numbers, scales)


def _held_four_bits(packed: Packed, parts: Mapping[str, torch.Tensor]) -> Bnb4Weight | None:
    """Return a weight whose blocks end with its rows; its scales are expanded if an outer one ends elsewhere."""
    rows, into = packed.shape[0], math.prod(packed.shape[1:])
    block, nested, scales = packed.state["block"], packed.state["nested_block"], parts["absmax"].flatten()
    if into % block or into % 2 or parts["quant_map"].numel() != 16 or scales.numel() * block != rows * into:
        return None
    codes, tables = parts["numbers"].flatten().view(torch.uint8).view(rows, -1), parts["quant_map"].to(_WIDE).flatten()
    if not nested:
        return Bnb4Weight(codes, scales.to(_WIDE).view(rows, -1), tables, tables.new_empty(0))
    inner, outer = parts["nested_quant_map"].to(_WIDE).flatten(), parts["nested_absmax"].to(_WIDE).flatten()
    if scales.dtype != torch.uint8 or inner.numel() != 256 or outer.numel() != -(-scales.numel() // nested):
        return None
    if scales.numel() % nested and outer.numel() > 1:
        largest = inner[scales.int()] * outer.repeat_interleave(nested)[: scales.numel()] + packed.state["offset"]
        return Bnb4Weight(codes, largest.view(rows, -1), tables, tables.new_empty(0))
    offset = torch.full((1,), packed.state["offset"], dtype=_WIDE, device=tables.device)
    return Bnb4Weight(codes, scales.view(rows, -1), torch.cat([tables, inner, offset]), outer)
