"""The change that an adapter makes to a weight: one formula per algorithm, for merging and for layers."""

from inweave.ops.delta.fit import padded
from inweave.ops.delta.reference import change, delta

__all__ = ["change", "delta", "padded"]
