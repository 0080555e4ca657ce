"""Low-rank products added to the rows of a batch, other ones to each row: a plain reference and kernels."""

from inweave.ops.rowwise.reference import SlotFactors
from inweave.ops.rowwise.select import add_products
from inweave.ops.rowwise.table import RowTable

__all__ = ["RowTable", "SlotFactors", "add_products"]
