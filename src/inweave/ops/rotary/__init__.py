"""Heads of attention, normalized, rotated and joined into one sequence: a plain reference and a kernel each way."""

from inweave.ops.rotary.autograd import join_heads
from inweave.ops.rotary.packed import join_projections

__all__ = ["join_heads", "join_projections"]
