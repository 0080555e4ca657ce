"""Many low-rank products added to many weights at once: a plain reference and one grouped kernel."""

from inweave.ops.merge.dispatch import merge_products
from inweave.ops.merge.reference import all_usable, usable_numbers
from inweave.ops.merge.work import Product, Target, limit_of

__all__ = ["Product", "Target", "all_usable", "limit_of", "merge_products", "usable_numbers"]
