"""Attention by the fastest of the libraries' kernels, measured per shape."""

from inweave.ops.attention.function import MeasuredAttention, attention

__all__ = ["MeasuredAttention", "attention"]
