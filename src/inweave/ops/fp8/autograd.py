"""Products with fp8 rows as operators, and x W^T + b for autograd.

    forward    y  = x8 W8^T * (scales of x's rows) * (scales of W's rows) + b
    backward   dx = dy8 V8^T * (scales of dy's rows) * (scales of V's rows)        V = W^T

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


def fp8_linear(
    x: Tensor, rows: Tensor, row_scales: Tensor, columns: Tensor, column_scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Return x W^T + b of a matrix x, with gradients of x and of a trained bias."""
    work: Any = _TracedLinear.apply if select.is_traced() else torch.ops.inweave.fp8_linear
    y: Tensor = work(x, rows, row_scales, columns, column_scales, bias)
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


def _forward(
    x: Tensor, rows: Tensor, row_scales: Tensor, columns: Tensor, column_scales: Tensor, bias: Tensor | None
) -> Tensor:
    return scaled_product(quantize_rows(x), rows, row_scales, bias, x.dtype, fast=True)


def _backward(dy: Tensor, columns: Tensor, column_scales: Tensor) -> Tensor:
    return scaled_product(quantize_rows(dy), columns, column_scales, None, dy.dtype, fast=False)


def _product(
    x: Tensor, scales: Tensor, rows: Tensor, row_scales: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    return scaled_product((x, scales), rows, row_scales, bias, dtype, fast=fast)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, _, columns, column_scales, _ = inputs
    ctx.save_for_backward(columns, column_scales)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    dx = torch.ops.inweave.fp8_linear_backward(dy, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None
    return dx, None, None, None, None, _bias_gradient(dy) if ctx.needs_input_grad[5] else None


def _bias_gradient(dy: Tensor) -> Tensor:
    return dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(dy.dtype)


register_operator(
    "fp8_linear(Tensor x, Tensor rows, Tensor row_scales, Tensor columns, Tensor column_scales, Tensor? bias)"
    " -> Tensor",
    _forward,
    meta.fp8_linear,
    save=_save,
    gradients=_gradients,
)
register_operator(
    "fp8_linear_backward(Tensor dy, Tensor columns, Tensor column_scales) -> Tensor", _backward, meta.fp8_linear
)
register_operator(
    "fp8_product(Tensor x, Tensor scales, Tensor rows, Tensor row_scales, Tensor? bias, ScalarType dtype, bool fast)"
    " -> Tensor",
    _product,
    meta.fp8_product,
)


class _TracedLinear(torch.autograd.Function):
    """`fp8_linear` for a compiler, which sees how x and dy are quantized, and that nothing else reads the results."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        row_scales: Tensor,
        columns: Tensor,
        column_scales: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(columns, column_scales)
        y: Tensor = torch.ops.inweave.fp8_product(*traced_rows(x), rows, row_scales, bias, x.dtype, True)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        columns, column_scales = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.inweave.fp8_product(*traced_rows(dy), columns, column_scales, None, dy.dtype, False)
        return dx, None, None, None, None, _bias_gradient(dy) if ctx.needs_input_grad[5] else None
