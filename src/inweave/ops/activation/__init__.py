"""Activations in one pass: a plain reference and kernels."""

from inweave.ops.activation.dispatch import geglu
from inweave.ops.activation.function import ensure_same_rows, gelu_matrix, gelu_matrix_gradients, tanh_gelu

__all__ = ["ensure_same_rows", "geglu", "gelu_matrix", "gelu_matrix_gradients", "tanh_gelu"]
