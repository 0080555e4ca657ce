"""Shapes of the activations' results: the memory that the kernels allocate, without arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor


def geglu(x: Tensor) -> Tensor:
    """Allocate the result of `reference.geglu`."""
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def geglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Allocate the result of `reference.geglu_backward`."""
    return torch.empty_like(x)


def tanh_gelu(x: Tensor, left: Tensor | None) -> Tensor:
    """Allocate the result of the operator `tanh_gelu`."""
    return x.new_empty(x.shape[0], x.shape[1] + (0 if left is None else left.shape[1]))


def tanh_gelu_backward(dy: Tensor, x: Tensor, of_x: bool, of_left: bool) -> tuple[Tensor, Tensor]:
    """Allocate the results of the operator `tanh_gelu_backward`; a gradient that is not requested is empty."""
    columns = dy.shape[1] - x.shape[1]
    return x.new_empty(x.shape if of_x else (0,)), x.new_empty((x.shape[0], columns) if of_left else (0,))
