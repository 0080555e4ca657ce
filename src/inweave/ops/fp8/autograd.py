"""Products with fp8 rows as operators, and x W^T + b for autograd.

    forward    y  = x8 W8^T * (scales of x's rows) * (scales of W's rows) + b
    backward   dx = g8 W8 * (scales of g's rows)        g = dy * (scales of W's rows)

W has one copy: its scales are folded into dy before that is quantized. `_scaled_mm` reads only rows, so on a GPU the
backward pass transposes W8 into memory that it frees again.

`_scaled_mm` is the product on a GPU; elsewhere the numbers are multiplied in float32, which is the definition and not
fast. The forward pass accumulates in the tensor cores' own precision (fast accumulation), the backward pass in float32.

In eager code, quantizing x and the product are one operator. In a compiled region only the product is an operator: the
compiler fuses quantization with the operation that produces x, or dy (`select`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inweave.ops.common.operators import register_operator
from inweave.ops.common.select import is_nvidia
from inweave.ops.fp8 import meta, select
from inweave.ops.fp8.select import Rows, quantize_rows, traced_rows


def fp8_linear(x: Tensor, rows: Tensor, row_scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b of a matrix x, with gradients of x and of a trained bias."""
    work: Any = _TracedLinear.apply if select.is_traced() else torch.ops.inweave.fp8_linear
    y: Tensor = work(x, rows, row_scales, bias)
    return y


def scaled_product(
    x: Rows, rows: Tensor, row_scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """Return x @ (rows * row_scales)^T + bias of a quantized matrix x, in this dtype."""
    q, scales = x
    if is_nvidia(q):
        own = None if bias is None else bias.to(torch.bfloat16)
        left, right = q.contiguous(), rows.contiguous().t()  # some kernels ignore the strides of a part of a matrix
        product = torch._scaled_mm(
            left, right, scales, row_scales.t(), bias=own, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    else:
        product = (q.float() * scales) @ (rows.float() * row_scales).t()
        product = product if bias is None else product + bias
    return product.to(dtype)


def scaled_gradient(grad_rows: Rows, rows: Tensor, dtype: torch.dtype, column_scales: Tensor | None = None) -> Tensor:
    """Return the gradient of x from `folded` dy as quantized rows; ``column_scales`` (inputs, 1): of its columns."""
    scales = rows.new_ones(rows.shape[1], 1, dtype=torch.float32) if column_scales is None else column_scales
    return scaled_product(grad_rows, rows.t().contiguous(), scales, None, dtype, fast=False)


def folded(dy: Tensor, row_scales: Tensor) -> Tensor:
    """Return dy with the scales of W's rows, in float32."""
    return dy * row_scales.t()


def _forward(x: Tensor, rows: Tensor, row_scales: Tensor, bias: Tensor | None) -> Tensor:
    return scaled_product(quantize_rows(x), rows, row_scales, bias, x.dtype, fast=True)


def _backward(dy: Tensor, rows: Tensor, row_scales: Tensor) -> Tensor:
    return scaled_gradient(quantize_rows(folded(dy, row_scales)), rows, dy.dtype)


def _product(
    x: Tensor, scales: Tensor, rows: Tensor, row_scales: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    return scaled_product((x, scales), rows, row_scales, bias, dtype, fast=fast)


def _gradient(dy: Tensor, scales: Tensor, rows: Tensor, column_scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    return scaled_gradient((dy, scales), rows, dtype, column_scales)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rows, row_scales, _ = inputs
    ctx.save_for_backward(rows, row_scales)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 4
    dx = torch.ops.inweave.fp8_linear_backward(dy, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None
    return dx, None, None, _bias_gradient(dy) if ctx.needs_input_grad[3] else None


def _bias_gradient(dy: Tensor) -> Tensor:
    return dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(dy.dtype)


register_operator(
    "fp8_linear(Tensor x, Tensor rows, Tensor row_scales, Tensor? bias) -> Tensor",
    _forward,
    meta.fp8_linear,
    save=_save,
    gradients=_gradients,
)
register_operator(
    "fp8_linear_backward(Tensor dy, Tensor rows, Tensor row_scales) -> Tensor", _backward, meta.fp8_linear_backward
)
register_operator(
    "fp8_product(Tensor x, Tensor scales, Tensor rows, Tensor row_scales, Tensor? bias, ScalarType dtype, bool fast)"
    " -> Tensor",
    _product,
    meta.fp8_product,
)
register_operator(
    "fp8_gradient(Tensor dy, Tensor scales, Tensor rows, Tensor? column_scales, ScalarType dtype) -> Tensor",
    _gradient,
    meta.fp8_gradient,
)


class _TracedLinear(torch.autograd.Function):
    """`fp8_linear` for a compiler, which sees how x and dy are quantized, and that nothing else reads the results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, row_scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, row_scales)
        y: Tensor = torch.ops.inweave.fp8_product(*traced_rows(x), rows, row_scales, bias, x.dtype, True)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, row_scales = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.inweave.fp8_gradient(*traced_rows(folded(dy, row_scales)), rows, None, dy.dtype)
        return dx, None, None, _bias_gradient(dy) if ctx.needs_input_grad[3] else None
