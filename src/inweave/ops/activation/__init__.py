"""Gated activations in one pass: a plain reference and kernels."""

from inweave.ops.activation.dispatch import geglu

__all__ = ["geglu"]
