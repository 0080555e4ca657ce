"""Attention by the fastest of the libraries' kernels, measured per shape."""

from inweave.ops.attention.autograd import MeasuredAttention, attention
from inweave.ops.attention.fixed_order import MAX_WORKSPACE, frontend_problem, frontend_version
from inweave.ops.attention.kernels import ALL
from inweave.ops.attention.select import machine_name, recorded_choices

__all__ = [
    "ALL",
    "MAX_WORKSPACE",
    "MeasuredAttention",
    "attention",
    "frontend_problem",
    "frontend_version",
    "machine_name",
    "recorded_choices",
]
