"""Products and convolutions with a weight that is dequantized for them, as operators: gradients dequantize it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input

from inweave.ops.common.operators import register_operator
from inweave.ops.quantized.base import QuantizedWeight, restore_weight


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Return x W^T + b of a matrix x, with gradients of x and of a trained bias."""
    parts = (*weight, None, None, None)[:4]
    y: Tensor = torch.ops.inweave.quantized_linear(x, *parts, weight.format(), bias)
    return y


def quantized_conv2d(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, *geometry: Sequence[int]) -> Tensor:
    """Return the convolution of images x, with gradients; ``geometry``: kernel, stride, padding, dilation."""
    parts = (*weight, None, None, None)[:4]
    y: Tensor = torch.ops.inweave.quantized_conv2d(x, *parts, weight.format(), bias, *map(list, geometry))
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


def _filters(weight: QuantizedWeight, like: Tensor, kernel: Sequence[int]) -> Tensor:
    matrix = weight.dequantized(like.dtype)
    filters = matrix.view(len(matrix), -1, *kernel)
    last = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    return filters.contiguous(memory_format=torch.channels_last) if last else filters


def _conv_forward(
    x: Tensor,
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    fourth: Tensor | None,
    format: str,
    bias: Tensor | None,
    kernel: Sequence[int],
    *geometry: Sequence[int],
) -> Tensor:
    filters = _filters(restore_weight(format, first, second, third, fourth), x, kernel)
    stride, padding, dilation = map(list, geometry)
    return functional.conv2d(x, filters, bias, stride, padding, dilation)


def _conv_backward(
    dy: Tensor,
    size: Sequence[int],
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    fourth: Tensor | None,
    format: str,
    kernel: Sequence[int],
    *geometry: Sequence[int],
) -> Tensor:
    filters = _filters(restore_weight(format, first, second, third, fourth), dy, kernel)
    dx: Tensor = conv2d_input(size, filters, dy, *geometry)  # type: ignore[no-untyped-call]
    return dx


def _conv_shape(x: Tensor, first: Tensor, *others: Any) -> Tensor:
    """Allocate y."""
    kernel, stride, padding, dilation = others[-4:]
    sides = (
        (x.shape[2 + axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis in range(2)
    )
    return _empty(x, (x.shape[0], first.shape[0], *sides))


def _conv_backward_shape(dy: Tensor, size: Sequence[int], *others: Any) -> Tensor:
    """Allocate dx."""
    return _empty(dy, tuple(size))


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    last = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def _conv_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *tensors, ctx.format, _, ctx.kernel, ctx.stride, ctx.padding, ctx.dilation = inputs
    ctx.size = x.shape
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _conv_gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 11
    geometry = ctx.kernel, ctx.stride, ctx.padding, ctx.dilation
    operator = torch.ops.inweave.quantized_conv2d_backward
    of_x, of_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[6]
    dx = operator(dy, ctx.size, *ctx.saved_tensors, ctx.format, *geometry) if of_x else None
    return dx, *[None] * 5, dy.sum((0, 2, 3)) if of_bias else None, *[None] * 4


_GEOMETRY = "int[] kernel, int[] stride, int[] padding, int[] dilation"
register_operator(
    f"quantized_conv2d(Tensor x, {_WEIGHT}, Tensor? bias, {_GEOMETRY}) -> Tensor",
    _conv_forward, _conv_shape, save=_conv_save, gradients=_conv_gradients,
)  # fmt: skip
register_operator(
    f"quantized_conv2d_backward(Tensor dy, SymInt[] size, {_WEIGHT}, {_GEOMETRY}) -> Tensor",
    _conv_backward,
    _conv_backward_shape,
)
