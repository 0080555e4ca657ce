"""Dropout with masks from torch's generator or from per-row seeds.

    functional.dropout     one mask for the whole batch; it depends on the batch size
    row_seeds (B, 2)       the mask of a row is a hash of (its seeds, the layer, the position in the row), so it does
                           not depend on batch splitting or device, and recomputed activations get the same mask

    hash(n) = mix(mix(n * golden + seed_0 + layer) ^ seed_1)        on 32 bits; kept where it is at least p * 2**32

The first axis of x may be a multiple of B if the rows of an example are contiguous (chunks of a text, tokens). Rows
that belong to no single example (tokens routed to experts) share one mask, derived from the sum of the seeds: torch's
generator is never read.

An adapter has up to five dropouts with independent masks. With h = down(x), the hidden values of a LoRA:

    dropout          of x                                        as PEFT's lora_dropout
    hidden_dropout   of h                                        as kohya's network_dropout
    rank_dropout     of h, whole ranks of a row of x at once     as kohya's rank_dropout
    module_dropout   of h, all of an example; the rest is not    as kohya's and LyCORIS' module_dropout, which draw
                     scaled, so that the module alone is left    once per batch, as here without seeds
    output_dropout   of the rows of its change: outputs of an    as LyCORIS' rank_dropout of LoCon and DoRA, which
                     example; the rest is not scaled             draws once per batch, as here without seeds

With DoRA an output that is dropped keeps its magnitude: m / |W| * W x. LoHa and LoKr have no h. Their rank_dropout is
of the outputs that they add, not scaled, as LyCORIS drops rows of their change, once per batch; their module_dropout,
and DoRA's, is of all that they add.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch.nn import functional

_BITS = 0xFFFFFFFF
_GOLDEN, _MIX = 0x1E3779B1, 0x45D9F3B  # products of 32 bits with these stay below 2**63
#: added to a layer's number, so that masks between the factors are independent of the mask of x
HIDDEN, RANKS, MODULE, OUTPUTS = (
    zlib.crc32(name) for name in (b"hidden_dropout", b"rank_dropout", b"module_dropout", b"output_dropout")
)


def dropout(
    x: torch.Tensor,
    p: float,
    training: bool,
    row_seeds: torch.Tensor | None,
    layer: int | torch.Tensor,
    shape: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Set a fraction ``p`` of the values of ``x`` to zero in training and scale the rest by 1 / (1 - p).

    ``layer``: the layer's `layer_number`, as an int or a tensor on the device; with a tensor, compiled code is shared
    between blocks.
    ``shape``: the shape of the mask if values share it: that of ``x`` with some axes of 1.
    """
    if not training or not p:
        return x
    if row_seeds is None and shape is None:
        return functional.dropout(x, p, True)
    mask = _mask(x, p, row_seeds, layer, x.shape if shape is None else shape)
    return x * mask.to(x.dtype) * (1 / (1 - p))


def _mask(
    x: torch.Tensor, p: float, row_seeds: torch.Tensor | None, layer: int | torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    if row_seeds is None:
        return torch.rand(shape, device=x.device) >= p
    whole = x.shape[0] % len(row_seeds) == 0
    seeds = row_seeds if whole else row_seeds.sum(0, keepdim=True)
    return row_mask(seeds.to(x.device), shape, p, layer)


def output_dropout(
    change: torch.Tensor, p: float, axis: int, row_seeds: torch.Tensor | None, layer: int | torch.Tensor
) -> torch.Tensor:
    """Set a fraction ``p`` of the outputs of each example to zero, and return the others unchanged.

    ``axis``: that of the outputs.
    """
    return change * output_mask(change, p, axis, row_seeds, layer)


def output_mask(
    change: torch.Tensor, p: float, axis: int, row_seeds: torch.Tensor | None, layer: int | torch.Tensor
) -> torch.Tensor:
    """Return 0 for the outputs that `output_dropout` sets to zero and 1 for the others."""
    axis %= change.dim()
    sizes = [1] * change.dim()
    sizes[axis] = change.shape[axis]
    rows = change.shape[0] if axis else 1
    if row_seeds is not None and rows % len(row_seeds):
        row_seeds = row_seeds.sum(0, keepdim=True)
    if row_seeds is not None and axis:
        sizes[0] = len(row_seeds)  # tokens that were flattened into rows have the mask of their example
    mask = _mask(change, p, row_seeds, layer, tuple(sizes)).to(change.dtype)
    return mask.repeat_interleave(rows // sizes[0], 0) if 1 < sizes[0] < rows else mask


def rank_dropout(
    hidden: torch.Tensor,
    p: float,
    axis: int,
    rank: int,
    row_seeds: torch.Tensor | None,
    layer: int | torch.Tensor,
) -> torch.Tensor:
    """Drop a fraction ``p`` of the ranks of each row of ``hidden`` and scale the rest by 1 / (1 - p).

    ``axis`` has ``rank`` values, or ``rank`` values per group of a convolution; all groups drop the same ranks.
    """
    axis %= hidden.dim()
    grouped = hidden.reshape(*hidden.shape[:axis], -1, rank, *hidden.shape[axis + 1 :])
    sizes = [1] * grouped.dim()
    sizes[axis + 1] = rank
    if axis:
        sizes[0] = hidden.shape[0]
    return dropout(grouped, p, True, row_seeds, layer, tuple(sizes)).flatten(axis, axis + 1)


def module_dropout(
    hidden: torch.Tensor, p: float, axis: int, row_seeds: torch.Tensor | None, layer: int | torch.Tensor
) -> torch.Tensor:
    """Set ``hidden`` to zero for a fraction ``p`` of the examples, and return the others unchanged.

    ``axis``: that of the ranks; an input without an axis of examples is one.
    """
    if row_seeds is None:
        mask = torch.rand(1, device=hidden.device) >= p
    else:
        rows = hidden.shape[0] if axis % hidden.dim() else 1
        seeds = row_seeds if rows % len(row_seeds) == 0 else row_seeds.sum(0, keepdim=True)
        mask = row_mask(seeds.to(hidden.device), (len(seeds),), p, layer).repeat_interleave(rows // len(seeds))
    return hidden * mask.to(hidden.dtype).reshape(-1, *[1] * (hidden.dim() - 1))


def layer_number(name: str) -> int:
    """Return the number that makes the masks of this layer differ from those of other layers."""
    return zlib.crc32(name.encode())


@torch.no_grad()
def row_mask(row_seeds: torch.Tensor, shape: tuple[int, ...], p: float, layer: int | torch.Tensor) -> torch.Tensor:
    """Return a mask that is True where a value is kept."""
    rows = len(row_seeds)
    first, second = ((row_seeds[:, column : column + 1] & _BITS) for column in (0, 1))
    place = torch.arange(math.prod(shape) // rows, device=row_seeds.device)
    number = ((place & _BITS) * _GOLDEN & _BITS) + first + layer
    number = _mixed(_mixed(number & _BITS) ^ second)
    return (number >= int(p * 2**32)).reshape(shape)


def _mixed(number: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        number = ((number >> 16) ^ number) * _MIX & _BITS
    return (number >> 16) ^ number
