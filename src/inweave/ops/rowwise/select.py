"""Which implementation adds: the kernels for CUDA tensors that they support, the reference for all others."""

from __future__ import annotations

from torch import Tensor

from inweave.ops.common.select import implementation, on_device_of
from inweave.ops.rowwise.reference import Inner, SlotFactors
from inweave.ops.rowwise.table import RowTable

_PACKAGE = "inweave.ops.rowwise"


def add_products(y: Tensor, x: Tensor, factors: SlotFactors, table: RowTable, inner: Inner | None = None) -> Tensor:
    """Return y with the products of each row's slots added, in new memory; see `reference.add_products`."""
    with on_device_of(x):
        total: Tensor = implementation(_PACKAGE, x).add_products(y, x, factors, table, inner)
    return total
