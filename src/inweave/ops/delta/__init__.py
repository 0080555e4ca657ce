"""What an adapter adds to a weight: one formula an algorithm, proved once, used by everyone."""

from inweave.ops.delta.fit import padded
from inweave.ops.delta.reference import change, delta

__all__ = ["change", "delta", "padded"]
