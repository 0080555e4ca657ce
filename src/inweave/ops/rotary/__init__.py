"""Heads of attention, normalized, rotated and joined to one sequence: a plain reference and a kernel each way."""

from inweave.ops.rotary.function import join_heads

__all__ = ["join_heads"]
