"""Many low-rank products added to many weights at once: a plain reference and one grouped kernel."""

from inweave.ops.merge.dispatch import merge_products
from inweave.ops.merge.reference import all_finite, finite_numbers
from inweave.ops.merge.work import Product, Target

__all__ = ["Product", "Target", "all_finite", "finite_numbers", "merge_products"]
