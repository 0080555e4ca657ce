"""Shapes of the activations' results: the memory that the kernels allocate, without arithmetic."""

from __future__ import annotations

import torch


def geglu(x: torch.Tensor) -> torch.Tensor:
    """Allocate the result of `reference.geglu`."""
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def geglu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Allocate the result of `reference.geglu_backward`."""
    return torch.empty_like(x)


def tanh_gelu(x: torch.Tensor, left: torch.Tensor | None) -> torch.Tensor:
    """Allocate the result of the operator `tanh_gelu`."""
    return x.new_empty(x.shape[0], x.shape[1] + (0 if left is None else left.shape[1]))


def tanh_gelu_backward(
    dy: torch.Tensor, x: torch.Tensor, of_x: bool, of_left: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results of the operator `tanh_gelu_backward`; a gradient that is not requested is empty."""
    columns = dy.shape[1] - x.shape[1]
    return x.new_empty(x.shape if of_x else (0,)), x.new_empty((x.shape[0], columns) if of_left else (0,))
