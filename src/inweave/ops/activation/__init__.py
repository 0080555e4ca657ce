"""GEGLU and the tanh GELU in one pass: a plain reference and kernels."""

from inweave.ops.activation.autograd import ensure_same_rows, geglu, gelu_matrix, gelu_matrix_gradients, tanh_gelu

__all__ = ["ensure_same_rows", "geglu", "gelu_matrix", "gelu_matrix_gradients", "tanh_gelu"]
