"""Two frozen fp8 layers with the tanh GELU between them: its kernels write their results as quantized rows.

    forward    z = x W^T + b                  y = [left | gelu(z)] U^T + c     left: columns of another input, or none
    backward   [dleft | d] = dy U             dx = (d gelu'(z)) W

Nothing else reads gelu(z) and the gradient of z, so neither is written in 16 bits: at the widths of Flux's single
blocks, 4608 rows of 3072 + 12288, the forward pass moves 212 MB instead of 495, the backward pass 312 instead of 567.
For the same x the bits equal those of GELU (`ops.activation`), `quantize_rows` and the products one after the other.
The gradient differs by roundings: the scales of W's rows, which belong to the gradient of z, multiply the columns of d.
z is saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from inweave.ops.activation import ensure_same_rows, gelu_matrix, gelu_matrix_gradients
from inweave.ops.common.gradients import first_derivative_only
from inweave.ops.common.operators import register_operator
from inweave.ops.common.select import has_kernels, on_device_of
from inweave.ops.fp8 import meta, select
from inweave.ops.fp8.autograd import folded
from inweave.ops.fp8.reference import WIDEST
from inweave.ops.fp8.select import Rows, quantize_rows, traced_rows

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class Fp8Layer(Protocol):
    """A layer with a quantized weight and a frozen bias: `inweave.ops.quantized.fp8.Fp8Linear`."""

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def quantized(self) -> Iterable[Tensor]: ...


def frozen_feed_forward(x: Tensor, first: Fp8Layer, second: Fp8Layer, left: Tensor | None = None) -> Tensor:
    """Return ``second`` of [left | gelu(first(x))] for x (..., inputs) and left (..., columns) of one dtype."""
    ensure_same_rows(x, left)
    inputs = x.reshape(-1, x.shape[-1]), None if left is None else left.reshape(-1, left.shape[-1])
    work: Any = _FeedForward.apply
    y: Tensor = work(*inputs, *first.quantized, first.bias, *second.quantized, second.bias)
    return y.view(*x.shape[:-1], y.shape[-1])


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, left: Tensor | None, *layers: Tensor | None) -> Tensor:
        operators = torch.ops.inweave
        rows, row_scales, bias, next_rows, next_row_scales, next_bias = layers
        z = operators.fp8_product(*_rows_of(x), rows, row_scales, bias, x.dtype, True)
        activations = operators.gelu_rows(z, left)
        y: Tensor = operators.fp8_product(*activations, next_rows, next_row_scales, next_bias, x.dtype, True)
        ctx.save_for_backward(z, rows, row_scales, next_rows, next_row_scales)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        operators = torch.ops.inweave
        z, rows, row_scales, next_rows, next_row_scales = ctx.saved_tensors
        of_x, of_left = ctx.needs_input_grad[:2]
        ones = row_scales.new_ones(next_rows.shape[1] - len(row_scales), 1)
        columns = torch.cat([ones, row_scales])  # of d: those of [left | z]
        d = operators.fp8_gradient(*_rows_of(folded(dy, next_row_scales)), next_rows, columns, dy.dtype)
        gradients, scales, dleft = operators.gelu_gradient_rows(d, z, of_x, of_left)
        dx = operators.fp8_gradient(gradients, scales, rows, None, dy.dtype) if of_x else None
        return dx, dleft if of_left else None, *[None] * 6


def _rows_of(x: Tensor) -> Rows:
    return traced_rows(x) if select.is_traced() else quantize_rows(x)


def _gelu_rows(z: Tensor, left: Tensor | None) -> Rows:
    if _has_kernel(z, 0 if left is None else left.shape[1]):
        from inweave.ops.fp8 import triton as kernel

        with on_device_of(z):
            return kernel.gelu_rows(z.contiguous(), None if left is None else left.contiguous())
    return quantize_rows(gelu_matrix(z, left))


def _gelu_gradient_rows(d: Tensor, z: Tensor, of_z: bool, of_left: bool) -> tuple[Tensor, Tensor, Tensor]:
    if of_z and _has_kernel(z, 0):
        from inweave.ops.fp8 import triton as kernel

        with on_device_of(z):
            rows, scales, dleft = kernel.gelu_gradient_rows(d.contiguous(), z.contiguous(), of_left)
    else:
        dz, dleft = gelu_matrix_gradients(d, z, of_z, of_left)
        rows, scales = quantize_rows(z.new_empty(0, z.shape[1]) if dz is None else dz)
    return rows, scales, z.new_empty(0, 0) if dleft is None else dleft


def _has_kernel(z: Tensor, columns: int) -> bool:
    return has_kernels(z) and z.dtype in _KERNEL_DTYPES and z.shape[1] + columns <= WIDEST and z.numel() > 0


register_operator("gelu_rows(Tensor z, Tensor? left) -> (Tensor, Tensor)", _gelu_rows, meta.gelu_rows)
register_operator(
    "gelu_gradient_rows(Tensor d, Tensor z, bool of_z, bool of_left) -> (Tensor, Tensor, Tensor)",
    _gelu_gradient_rows,
    meta.gelu_gradient_rows,
)
