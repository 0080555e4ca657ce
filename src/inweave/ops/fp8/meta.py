"""Shapes of the results of the fp8 operators, for tracing and for the meta device."""

from __future__ import annotations

import torch
from torch import Tensor


def fp8_linear(x: Tensor, rows: Tensor, *others: Tensor | None) -> Tensor:
    """Allocate x @ rows^T."""
    return x.new_empty(x.shape[0], rows.shape[0])


def fp8_linear_backward(dy: Tensor, rows: Tensor, row_scales: Tensor) -> Tensor:
    """Allocate dy @ rows."""
    return dy.new_empty(dy.shape[0], rows.shape[1])


def fp8_product(
    x: Tensor, scales: Tensor, rows: Tensor, row_scales: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Allocate x @ rows^T in a dtype."""
    return x.new_empty(x.shape[0], rows.shape[0], dtype=dtype)


def fp8_gradient(dy: Tensor, scales: Tensor, rows: Tensor, column_scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Allocate dy @ rows in a dtype."""
    return dy.new_empty(dy.shape[0], rows.shape[1], dtype=dtype)


def gelu_rows(z: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor]:
    """Allocate the quantized rows of [left | gelu(z)] and their scales."""
    width = z.shape[1] + (0 if left is None else left.shape[1])
    return z.new_empty(z.shape[0], width, dtype=torch.float8_e4m3fn), z.new_empty(z.shape[0], 1, dtype=torch.float32)


def gelu_gradient_rows(d: Tensor, z: Tensor, of_z: bool, of_left: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the quantized gradient of z, its scales, and the gradient of left; empty if not requested."""
    count = z.shape[0] if of_z else 0
    dleft = z.new_empty(z.shape[0], d.shape[1] - z.shape[1]) if of_left else z.new_empty(0, 0)
    return (
        z.new_empty(count, z.shape[1], dtype=torch.float8_e4m3fn),
        z.new_empty(count, 1, dtype=torch.float32),
        dleft,
    )
