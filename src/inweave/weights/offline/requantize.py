"""Changed weights in the form in which a file stores them: the inverse of `inweave.weights.packed`.

    scaled       number = W / scale                   scale = largest of the weight, row or block / largest number
    bnb int8     number = W * 127 / largest of the row
    bnb 4 bit    code   = nearest in the book to W / largest of the block; packed largest numbers keep their offset

Names, shapes and dtypes of the stored tensors stay. Scales are new, or the old ones where those hold every number and
round with a smaller error: numbers that did not change then keep their bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from inweave.formats.packed import BLOCK, Packed, blocks_of
from inweave.weights.packed import unpacked_weight

Parts = Mapping[str, Tensor]
_SMALLEST = 2.0**-100


def requantized_parts(name: str, packed: Packed, parts: Parts, total: Tensor) -> dict[str, Tensor]:
    """Return the stored tensors of a weight for other numbers, by role; ``total``: of its shape, in float32."""
    if packed.kind.startswith("bitsandbytes") and packed.kind != "bitsandbytes int8":
        return _four_bits(packed, parts, total)
    old, unit = parts["scales"], 1 / 127 if packed.kind == "bitsandbytes int8" else 1.0
    dtype = parts["numbers"].dtype
    limit = torch.finfo(dtype).max if dtype.is_floating_point else 127.0
    new = (_largest(total, old) / (limit * unit)).clamp_min(_SMALLEST).to(old.dtype).view(old.shape)
    candidates = []
    for scales in (old, new):
        wide = total / (_spread(scales.float(), total) * unit)
        if scales is old and not bool((wide.abs() <= limit).all()):
            continue
        numbers = wide.clamp(-limit, limit)
        stored = {**parts, "numbers": (numbers if dtype.is_floating_point else numbers.round()).to(dtype)}
        stored["scales"] = scales
        candidates.append(stored)
    return min(candidates, key=lambda each: float((unpacked_weight(name, packed, each) - total).norm()))


def _largest(total: Tensor, scales: Tensor) -> Tensor:
    """Return the largest magnitude of what shares a scale."""
    if scales.numel() == 1:
        return total.abs().amax()
    if scales.shape != blocks_of(tuple(total.shape)):
        return total.flatten(1).abs().amax(1)
    blocks = total.abs()
    for axis, side in enumerate(total.shape):
        room = (-side) % BLOCK
        blocks = functional.pad(blocks, [0, 0] * (total.dim() - 1 - axis) + [0, room])
        shape = [*blocks.shape[:axis], -1, BLOCK, *blocks.shape[axis + 1 :]]
        blocks = blocks.reshape(shape).amax(axis + 1)
    return blocks


def _spread(scales: Tensor, total: Tensor) -> Tensor:
    """Return the scale of every number."""
    if scales.numel() == 1 or scales.shape != blocks_of(tuple(total.shape)):
        return scales.reshape(-1, *[1] * (total.dim() - 1))
    for axis, side in enumerate(total.shape):
        scales = scales.repeat_interleave(BLOCK, axis).narrow(axis, 0, side)
    return scales


def _four_bits(packed: Packed, parts: Parts, total: Tensor) -> dict[str, Tensor]:
    count, block = math.prod(packed.shape), packed.state["block"]
    absmax = parts["absmax"]
    blocks = functional.pad(total.flatten(), (0, (-count) % block)).view(-1, block)
    largest, stored = blocks.abs().amax(1), dict(parts)
    if nested := packed.state["nested_block"]:
        offset, inner = packed.state["offset"], parts["nested_quant_map"].float().flatten()
        moved = largest - offset
        outer = functional.pad(moved, (0, (-len(moved)) % nested)).view(-1, nested).abs().amax(1)
        outer = outer.to(parts["nested_absmax"].dtype)
        repeated = outer.float().repeat_interleave(nested)[: len(moved)]
        codes = _nearest(inner, moved / repeated.clamp_min(_SMALLEST))
        stored |= {"absmax": codes.view(absmax.shape), "nested_absmax": outer.view(parts["nested_absmax"].shape)}
        largest = inner[codes.int()] * repeated + offset
    else:
        stored["absmax"] = largest.to(absmax.dtype).view(absmax.shape)
        largest = stored["absmax"].float().flatten()
    scales = largest.unsqueeze(1)
    quotients = torch.where(scales.abs() > _SMALLEST, blocks / scales, 0.0)
    codes = _nearest(parts["quant_map"].float().flatten(), quotients).flatten()[:count]
    codes = functional.pad(codes, (0, count % 2))
    numbers = parts["numbers"]
    stored["numbers"] = (codes[::2] << 4 | codes[1::2]).view(numbers.dtype).view(numbers.shape)
    return stored


def _nearest(book: Tensor, values: Tensor) -> Tensor:
    """Return the number of the value of a book nearest to each number, in a byte; a book need not be sorted."""
    ordered, places = book.sort()
    nearest = torch.bucketize(values, (ordered[1:] + ordered[:-1]) / 2, out_int32=True)
    return places[nearest].to(torch.uint8)
