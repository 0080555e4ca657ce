"""The product with a weight that is dequantized for it, as an operator: its gradient dequantizes it again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inweave.ops.common.operators import register_operator
from inweave.ops.quantized.base import QuantizedWeight, restore_weight


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Return x W^T + b of a matrix x, with gradients of x and of a trained bias."""
    parts = (*weight, None, None, None)[:4]
    y: Tensor = torch.ops.inweave.quantized_linear(x, *parts, weight.format(), bias)
    return y


def _forward(
    x: Tensor,
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    fourth: Tensor | None,
    format: str,
    bias: Tensor | None,
) -> Tensor:
    return restore_weight(format, first, second, third, fourth).product(x, bias, None)


def _backward(
    dy: Tensor,
    columns: int,
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    fourth: Tensor | None,
    format: str,
) -> Tensor:
    return restore_weight(format, first, second, third, fourth).gradient(dy, None)


def _shape(x: Tensor, first: Tensor, *others: Any) -> Tensor:
    """Allocate x W^T."""
    return x.new_empty(x.shape[0], first.shape[0])


def _backward_shape(dy: Tensor, columns: int, *others: Any) -> Tensor:
    """Allocate dy W."""
    return dy.new_empty(dy.shape[0], columns)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *tensors, ctx.format, _ = inputs
    ctx.columns = x.shape[1]
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    of_x, of_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[6]
    operator = torch.ops.inweave.quantized_linear_backward
    dx = operator(dy, ctx.columns, *ctx.saved_tensors, ctx.format) if of_x else None
    return dx, *[None] * 5, dy.sum(0) if of_bias else None


_WEIGHT = "Tensor first, Tensor? second, Tensor? third, Tensor? fourth, str format"
register_operator(
    f"quantized_linear(Tensor x, {_WEIGHT}, Tensor? bias) -> Tensor", _forward, _shape, save=_save, gradients=_gradients
)
register_operator(
    f"quantized_linear_backward(Tensor dy, SymInt columns, {_WEIGHT}) -> Tensor", _backward, _backward_shape
)
