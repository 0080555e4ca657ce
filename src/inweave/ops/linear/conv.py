"""A 2D convolution with a LoRA as one operation: the formulas of `inweave.ops.linear` with a window.

    forward    S  = conv(x, down)                          y      = conv(x, W) + b + s S up^T
    backward   dS = s dY up                                d_up   = s dY^T S
               dX = dX of conv(x, W) + dX of conv(x, down)         d_down = the gradient of down in conv(x, down), of dS

    x (B, K, H, W)   W (N, K, h, w)   b (N)   down (r, K, h, w)   up (N, r, 1, 1)
    S, dS (B, r, H', W')   y, dY (B, N, H', W')

All tensors are channels-last, so that S, y and their gradients are matrices, positions by rows, and `up` is a product
that adds to y in place. Convolutions are cuDNN's. A window of 1 x 1 is a linear layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from inweave.ops.common.gradients import first_derivative_only
from inweave.ops.linear import cublas
from inweave.ops.linear.autograd import Rounded, gradient_buffers, lora_linear, rounded_values

_Pair = tuple[int, int]


class Window(NamedTuple):
    """The geometry of a convolution with one group."""

    stride: _Pair
    padding: _Pair
    dilation: _Pair


def lora_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    window: Window,
    *,
    rounded_down: Rounded | None = None,
    rounded_up: Rounded | None = None,
) -> Tensor:
    """Return conv(x, W) + b + scale up(conv(x, down)), with gradients for x, ``down`` and ``up``; W and b are frozen.

    x is channels-last. x, W and b have one dtype; the factors are rounded to it, once, unless `Rounded` copies are
    passed.
    """
    if weight.shape[2:] == (1, 1) and window.stride == (1, 1) and window.padding == (0, 0):
        y = lora_linear(
            x.permute(0, 2, 3, 1), weight.flatten(1), bias, down.flatten(1), up.flatten(1), scale,
            rounded_down=_as_matrix(rounded_down), rounded_up=_as_matrix(rounded_up),
        )  # fmt: skip
        return y.permute(0, 3, 1, 2)
    result: Tensor = _LoraConv2d.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, down, up, scale, window, rounded_down, rounded_up
    )
    return result


def _as_matrix(rounded: Rounded | None) -> Rounded | None:
    if rounded is None:
        return None
    values, grads = rounded
    # `view` never copies: the gradient is written to it
    return Rounded(values.flatten(1), None if grads is None else grads.view(values.shape[0], -1))


def _rows(image: Tensor) -> Tensor:
    """Return (positions of all images, channels), a view of channels-last memory."""
    return image.permute(0, 2, 3, 1).flatten(0, 2)


class _LoraConv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        window: Window,
        rounded_down: Rounded | None,
        rounded_up: Rounded | None,
    ) -> Tensor:
        low_down = rounded_values(down, rounded_down, x.dtype)
        low_up = rounded_values(up, rounded_up, x.dtype).flatten(1)
        hidden = _channels_last(functional.conv2d(x, low_down, None, *window))
        y = _channels_last(functional.conv2d(x, weight, bias, *window))
        _rows(y).addmm_(_rows(hidden), low_up.T, alpha=scale)
        ctx.save_for_backward(x, weight, hidden, low_down, low_up)
        ctx.scale, ctx.window = scale, window
        ctx.shapes = [(factor.shape, factor.dtype) for factor in (down, up)]
        ctx.grads = gradient_buffers(rounded_down, rounded_up)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, hidden, down, up = ctx.saved_tensors
        of_x, _, _, of_down, of_up = ctx.needs_input_grad[:5]
        grad_out = _channels_last(grad_out)
        rows = _rows(grad_out)
        grad_up = None
        if of_up:
            grad_up = _total(ctx.grads[1], rows, *ctx.shapes[1])
            cublas.add_product(grad_up.view(up.shape), rows.T, _rows(hidden), ctx.scale)
        grad_x = grad_down = None
        if of_x or of_down:
            inner = rows.new_empty(rows.shape[0], up.shape[1]).addmm_(rows, up, beta=0, alpha=ctx.scale)
            batch, _, height, width = hidden.shape
            inner = inner.view(batch, height, width, up.shape[1]).permute(0, 3, 1, 2)
            added, change = _gradients(inner, x, down, ctx.window, of_x, of_down)
            if of_down:
                grad_down = _total(ctx.grads[0], rows, *ctx.shapes[0]).add_(change)
            if of_x:
                grad_x = _gradients(grad_out, x, weight, ctx.window, True, False)[0].add_(added)
        returned = [grad if own is None else None for grad, own in zip((grad_down, grad_up), ctx.grads, strict=True)]
        return grad_x, None, None, *returned, None, None, None, None


def _channels_last(image: Tensor) -> Tensor:
    return image.contiguous(memory_format=torch.channels_last)


def _total(own: Tensor | None, like: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the tensor that a factor's gradient is added to."""
    return like.new_zeros(shape, dtype=dtype) if own is None else own


def _gradients(
    grad_out: Tensor, x: Tensor, weight: Tensor, window: Window, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
        grad_out, x, weight, None, *window, False, (0, 0), 1, (of_x, of_weight, False)
    )
    return grad_x, grad_weight
