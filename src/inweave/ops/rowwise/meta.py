"""The shape of the result, and the memory that the kernels allocate, without arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from inweave.ops.rowwise.reference import Inner, SlotFactors
from inweave.ops.rowwise.table import RowTable


def add_products(y: Tensor, x: Tensor, factors: SlotFactors, table: RowTable, inner: Inner | None = None) -> Tensor:
    """Allocate the inner values and the result of `reference.add_products`."""
    if inner is None:
        x.new_empty(*x.shape[:2], table.slots.shape[1] * factors.most)
    else:
        inner(x, factors.down)
    return torch.empty_like(y)
