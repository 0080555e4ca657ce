"""Many low-rank products added to many weights at once: a plain reference and one grouped kernel."""

from inweave.ops.merge.reference import Product, WeightUpdate, all_usable, limit_of, usable_numbers
from inweave.ops.merge.select import merge_products, prepare_merge

__all__ = [
    "Product",
    "WeightUpdate",
    "all_usable",
    "limit_of",
    "merge_products",
    "prepare_merge",
    "usable_numbers",
]
