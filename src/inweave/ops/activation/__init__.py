"""Activations in one pass: a plain reference and kernels."""

from inweave.ops.activation.dispatch import geglu
from inweave.ops.activation.function import tanh_gelu

__all__ = ["geglu", "tanh_gelu"]
