"""Other low-rank products for each row of a batch, in plain torch: one product for neighboring rows with one slot.

    y_i + sum over m of  strength_im * scale_s * (x_i down_s^T) up_s          s = slots[i, m]

The factors of all slots of a layer are below each other: `down` (ranks of all slots, inputs) and `up` (ranks of all
slots, outputs), where slot s has the rows places[s] = (first, rank); a slot that does not change this layer has rank 0.
x_i down_s^T is rounded to the dtype of x, everything else is float32 and rounded once.

A row is computed from that row and the factors of its slots alone: a NaN in another row or in another slot does not
reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from inweave.ops.common.precision import widened
from inweave.ops.rowwise.table import RowTable

#: the inner values (rows, tokens, rank) of rows of x for a matrix `down`
Inner = Callable[[Tensor, Tensor], Tensor]


class SlotFactors(NamedTuple):
    """The factors of all slots of one layer.

    ``spans``: `places` on the host. ``most``: no slot has a larger rank.
    """

    down: Tensor
    up: Tensor
    places: Tensor  # (slots, 2) int32: first row, rank
    scales: Tensor  # (slots,) float32
    spans: list[tuple[int, int, float]]  # first row, rank, scale
    most: int


def add_products(y: Tensor, x: Tensor, factors: SlotFactors, table: RowTable, inner: Inner | None = None) -> Tensor:
    """Return y (rows, tokens, outputs) with the products added, in new memory; x has the rows of y.

    Args:
        y: the output of the layer.
        x: its input, (rows, tokens, inputs) without ``inner``.
        factors: of the layer.
        table: the slots of the rows.
        inner: computes x_i down_s^T where the layer is not a plain product.
    """
    inner = inner or functional.linear
    total = widened(y).clone()
    for first, last, slot, strengths in table.runs:
        start, rank, scale = factors.spans[slot]
        if rank:
            hidden = widened(inner(x[first:last], factors.down[start : start + rank]))
            share = torch.tensor(strengths, dtype=hidden.dtype, device=hidden.device).mul_(scale)
            total[first:last] += (hidden * share[:, None, None]) @ widened(factors.up[start : start + rank])
    return total.to(y.dtype)
