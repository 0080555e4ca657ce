"""Convolutions with a quantized weight: it is dequantized for each product, as in `dequantizing`.

    y  = conv(x, W) + b              W: the matrix (out, in * kernel) of any format, seen as (out, in, kernel)
    dx = transposed_conv(dy, W)      dequantized again, so that nothing is kept between the two

Convolutions with groups, with a padding mode other than zeros or with a padding by name stay plain (`matrix_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input

from inweave.ops.common.operators import register_operator
from inweave.ops.quantized.base import QuantizedLayer, QuantizedLinear, QuantizedWeight, restore_weight

_Pair = tuple[int, int]


class QuantizedConv2d(QuantizedLayer, nn.Conv2d):  # type: ignore[override]
    """A convolution with a quantized weight; there is a subclass for each format."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.out_channels, self.in_channels, *cast("_Pair", self.kernel_size)

    def forward(self, input: Tensor) -> Tensor:
        parts = (*self.quantized, None, None, None)[:4]
        geometry = list(self.stride), list(cast("_Pair", self.padding)), list(self.dilation)
        images = input if input.dim() == 4 else input.unsqueeze(0)
        y: Tensor = torch.ops.inweave.quantized_conv2d(
            images, *parts, self.quantized.format(), self.bias, list(self.kernel_size), *geometry
        )
        return y if input.dim() == 4 else y.squeeze(0)


def convolution_of(linear: type[QuantizedLinear]) -> type[QuantizedConv2d]:
    """Return the convolution of a format."""
    facts = ("weights", "bytes_per_parameter", "scratch_per_parameter", "precisions")
    members = {name: getattr(linear, name) for name in facts} | {"__module__": linear.__module__}
    return type(linear.__name__.replace("Linear", "Conv2d"), (QuantizedConv2d,), members)


def _filters(weight: QuantizedWeight, like: Tensor, kernel: Sequence[int]) -> Tensor:
    matrix = weight.dequantized(like.dtype)
    filters = matrix.view(len(matrix), -1, *kernel)
    last = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    return filters.contiguous(memory_format=torch.channels_last) if last else filters


def _forward(
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


def _backward(
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


def _shape(x: Tensor, first: Tensor, *others: Any) -> Tensor:
    """Allocate y."""
    kernel, stride, padding, dilation = others[-4:]
    sides = (
        (x.shape[2 + axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis in range(2)
    )
    return _empty(x, (x.shape[0], first.shape[0], *sides))


def _backward_shape(dy: Tensor, size: Sequence[int], *others: Any) -> Tensor:
    """Allocate dx."""
    return _empty(dy, tuple(size))


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    last = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *tensors, ctx.format, _, ctx.kernel, ctx.stride, ctx.padding, ctx.dilation = inputs
    ctx.size = x.shape
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 11
    geometry = ctx.kernel, ctx.stride, ctx.padding, ctx.dilation
    operator = torch.ops.inweave.quantized_conv2d_backward
    of_x, of_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[6]
    dx = operator(dy, ctx.size, *ctx.saved_tensors, ctx.format, *geometry) if of_x else None
    return dx, *[None] * 5, dy.sum((0, 2, 3)) if of_bias else None, *[None] * 4


_WEIGHT = "Tensor first, Tensor? second, Tensor? third, Tensor? fourth, str format"
_GEOMETRY = "int[] kernel, int[] stride, int[] padding, int[] dilation"
register_operator(
    f"quantized_conv2d(Tensor x, {_WEIGHT}, Tensor? bias, {_GEOMETRY}) -> Tensor",
    _forward, _shape, save=_save, gradients=_gradients,
)  # fmt: skip
register_operator(
    f"quantized_conv2d_backward(Tensor dy, SymInt[] size, {_WEIGHT}, {_GEOMETRY}) -> Tensor", _backward, _backward_shape
)
