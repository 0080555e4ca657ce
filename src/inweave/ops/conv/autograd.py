"""Convolution with a frozen weight, which saves nothing: torch saves the input for a gradient that is never requested.

y  = conv(x, weight) + bias
dx = transposed_conv(dy, weight)          the same kernel as in torch's backward pass, which does not read x
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from inweave.ops.common.gradients import are_frozen, first_derivative_only
from inweave.ops.common.layout import as_channels_last

_Pair = tuple[int, int]


def frozen_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: _Pair, padding: _Pair, dilation: _Pair, groups: int
) -> Tensor:
    """Return `functional.conv2d` of x; a trained weight or bias gets its gradient from torch."""
    if torch.compiler.is_compiling() or not are_frozen(weight, bias):
        return functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
    y: Tensor = _FrozenConv2d.apply(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-untyped-call]
    return y


class _FrozenConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.size, ctx.geometry = x.shape[2:], geometry
        return functional.conv2d(_known_layout(x), weight, bias, *geometry)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        # rows and columns at the end that no window of the forward pass reached
        windows = [dilation[axis] * (weight.shape[2 + axis] - 1) + 1 for axis in range(2)]
        left = tuple(
            size - ((dy.shape[2 + axis] - 1) * stride[axis] - 2 * padding[axis] + windows[axis])
            for axis, size in enumerate(ctx.size)
        )
        dx = functional.conv_transpose2d(_known_layout(dy), weight, None, stride, padding, left, groups, dilation)
        return dx, *[None] * 6


def _known_layout(image: Tensor) -> Tensor:
    """Return a channels-last image with unambiguous strides; any other image unchanged."""
    is_known = image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last) and image.shape[0] == 1
    return as_channels_last(image) if is_known else image
