"""Dropout, from torch's generator or from seeds of the rows.

    functional.dropout     one mask for the whole batch: another batch size has other masks
    row_seeds (B, 2)       the mask of a row is a hash of (its seeds, the layer, the place in the row): a batch has the masks
                           of its rows, however it is split, on every device, and again when activations are recomputed

    hash(n) = mix(mix(n * golden + seed_0 + layer) ^ seed_1)        on 32 bits; kept where it is at least p * 2**32

The first axis of x may be a multiple of B, if the rows of an example lie together (chunks of a text, tokens).
"""

from __future__ import annotations

import zlib

import torch
from torch.nn import functional

_BITS = 0xFFFFFFFF
_GOLDEN, _MIX = 0x1E3779B1, 0x45D9F3B  # products of 32 bits with these stay below 2**63


def dropout(
    x: torch.Tensor, p: float, training: bool, row_seeds: torch.Tensor | None, layer: int | torch.Tensor
) -> torch.Tensor:
    """``x`` with a share ``p`` of its values set to zero and the others scaled by 1 / (1 - p), in training.

    ``layer``: `layer_number` of its name, as a number or on the device: blocks that differ in a tensor compile alike.
    """
    if not training or not p:
        return x
    if row_seeds is None or x.shape[0] % len(row_seeds):  # rows of no example: tokens sent to experts
        return functional.dropout(x, p, True)
    return x * row_mask(row_seeds.to(x.device), x.shape, p, layer).to(x.dtype) * (1 / (1 - p))


def layer_number(name: str) -> int:
    """What tells the masks of this layer from those of others."""
    return zlib.crc32(name.encode())


@torch.no_grad()
def row_mask(row_seeds: torch.Tensor, shape: torch.Size, p: float, layer: int | torch.Tensor) -> torch.Tensor:
    """True where a value is kept."""
    rows = len(row_seeds)
    first, second = ((row_seeds[:, column : column + 1] & _BITS) for column in (0, 1))
    place = torch.arange(shape.numel() // rows, device=row_seeds.device)
    number = ((place & _BITS) * _GOLDEN & _BITS) + first + layer
    number = _mixed(_mixed(number & _BITS) ^ second)
    return (number >= int(p * 2**32)).reshape(shape)


def _mixed(number: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        number = ((number >> 16) ^ number) * _MIX & _BITS
    return (number >> 16) ^ number
