"""The operation for autograd: a function for eager mode and CUDA graphs, an operator for compiled regions.

    eager      `autograd.Function`: gradients of the factors are added directly to the buffers of `Rounded.grads`
    compiled   `torch.ops.inweave.lora_linear` with its own gradient; the factors' gradients are returned

A compiled operator must not write to views of one buffer: Inductor copies such an argument from the start of its
storage, at the offset that it had in the compiled block, and torch before 2.13 adds that offset twice, which is out of
bounds.

If W is quantized, compiled regions may quantize x and dY in plain operations, which the compiler fuses with their
producers, and pass both forms to the operator: the adapter is multiplied in 16 bits.

Both call the operator's forward, so that selective checkpointing sees one product whose result it can store. Only
requested gradients are computed: no dX if x requires no gradient, none of frozen factors. A second derivative raises an
error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from inweave.ops.common.gradients import first_derivative_only
from inweave.ops.common.operators import register_operator
from inweave.ops.linear import meta
from inweave.ops.linear.frozen import Weight, parts_of, rows_of, traced_gradient, traced_input, weight_of
from inweave.ops.linear.select import backward, forward


class Rounded(NamedTuple):
    """A factor's copy in the dtype of the inputs, valid for one forward and backward pass.

    ``grads``: a float32 buffer of the factor's shape: eager backward passes add to it, and not to the factor's `.grad`.
    """

    values: Tensor
    grads: Tensor | None = None


def rounded_values(factor: Tensor, rounded: Rounded | None, dtype: torch.dtype) -> Tensor:
    """Return a factor in the dtype of the inputs."""
    return factor.to(dtype) if rounded is None else rounded.values


def gradient_buffers(*rounded: Rounded | None) -> tuple[Tensor | None, ...]:
    """Return the buffers that the gradients of these factors are added to; None if they go to autograd."""
    return tuple(None if each is None else each.grads for each in rounded)


def lora_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    *,
    rounded_down: Rounded | None = None,
    rounded_up: Rounded | None = None,
) -> Tensor:
    """Return x W^T + b + scale (x down^T) up^T for x (..., K), with gradients for x, ``down`` and ``up``.

    W and b are frozen. x, W and b have one dtype, unless W is quantized; the factors are rounded to it, once, unless
    `Rounded` copies are passed.
    """
    first, *parts, format = parts_of(weight)
    if torch.compiler.is_compiling():
        low_down = None if rounded_down is None else rounded_down.values
        low_up = None if rounded_up is None else rounded_up.values
        y: Tensor = torch.ops.inweave.lora_linear(
            x, first, bias, down, up, scale, low_down, low_up, *parts, format, *traced_input(x, weight)
        )[0]
        return y
    result: Tensor = _LoraLinear.apply(  # type: ignore[no-untyped-call]
        x, first, bias, down, up, scale, rounded_down, rounded_up, format, *parts
    )
    return result


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        rounded_down: Rounded | None,
        rounded_up: Rounded | None,
        format: str | None,
        *parts: Tensor | None,
    ) -> Tensor:
        low_down, low_up = rounded_values(down, rounded_down, x.dtype), rounded_values(up, rounded_up, x.dtype)
        with torch._C._AutoDispatchBelowAutograd():  # gradients are this function's
            y: Tensor
            y, hidden = torch.ops.inweave.lora_linear(
                x, weight, bias, low_down, low_up, scale, None, None, *parts, format
            )
        of_x, _, _, of_down, of_up = ctx.needs_input_grad[:5]
        ctx.save_for_backward(
            x if of_down else None, hidden if of_up else None, low_down, low_up, *((weight, *parts) if of_x else ())
        )
        ctx.scale, ctx.format = scale, format
        ctx.dtypes = down.dtype, up.dtype
        ctx.grads = gradient_buffers(rounded_down, rounded_up)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, down, up, *weight = ctx.saved_tensors
        of_x, _, _, of_down, of_up = ctx.needs_input_grad[:5]
        fresh = all(own is None for own in ctx.grads)
        make = torch.empty_like if fresh else torch.zeros_like
        grads = [
            make(factor, dtype=dtype) if needed and own is None else None
            for needed, factor, dtype, own in zip((of_down, of_up), (down, up), ctx.dtypes, ctx.grads, strict=True)
        ]
        into_down, into_up = (
            None if not needed else made if own is None else own
            for needed, made, own in zip((of_down, of_up), grads, ctx.grads, strict=True)
        )
        grad_x = backward(
            grad_out, grad_out if x is None else x, hidden, weight_of(ctx.format, *weight) if weight else None,
            down, up, ctx.scale, grad_x=of_x, grad_down=into_down, grad_up=into_up, fresh=fresh,
        )  # fmt: skip
        return grad_x, None, None, grads[0], grads[1], *[None] * 7


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    low_down: Tensor | None,
    low_up: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
    fourth: Tensor | None,
    format: str | None,
    x_rows: Tensor | None = None,
    x_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return forward(
        x, weight_of(format, weight, second, third, fourth), bias,
        down.to(x.dtype) if low_down is None else low_down, up.to(x.dtype) if low_up is None else low_up, scale,
        rows_of(x_rows, x_scales),
    )  # fmt: skip


def _backward(
    grad_out: Tensor,
    x: Tensor,
    hidden: Tensor,
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    scale: float,
    low_down: Tensor | None,
    low_up: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
    fourth: Tensor | None,
    format: str | None,
    of_x: bool,
    of_down: bool,
    of_up: bool,
    grad_rows: Tensor | None = None,
    grad_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_down, grad_up = (meta.empty_like(like, needed) for like, needed in ((down, of_down), (up, of_up)))
    grad_x = backward(
        grad_out, x, hidden, weight_of(format, weight, second, third, fourth),
        down.to(x.dtype) if low_down is None else low_down, up.to(x.dtype) if low_up is None else low_up, scale,
        grad_x=of_x, grad_down=grad_down if of_down else None, grad_up=grad_up if of_up else None, fresh=True,
        quantized=rows_of(grad_rows, grad_scales),
    )  # fmt: skip
    return meta.empty_like(x, False) if grad_x is None else grad_x, grad_down, grad_up


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, down, up, ctx.scale, low_down, low_up, *parts, ctx.format, x_rows, _ = inputs
    ctx.quantizes = x_rows is not None
    ctx.save_for_backward(x, output[1], down, up, low_down, low_up, weight, *parts)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 14
    x, hidden, down, up, low_down, low_up, first, *parts = ctx.saved_tensors
    of_x, _, _, of_down, of_up = ctx.needs_input_grad[:5]
    rows = traced_gradient(grad_out, weight_of(ctx.format, first, *parts)) if ctx.quantizes and of_x else (None, None)
    grad_x, grad_down, grad_up = torch.ops.inweave.lora_linear_backward(
        grad_out, x, hidden, first, down, up, ctx.scale, low_down, low_up, *parts, ctx.format, of_x, of_down, of_up,
        *rows,
    )  # fmt: skip
    factors = grad_down if of_down else None, grad_up if of_up else None
    return grad_x if of_x else None, None, None, *factors, *[None] * 9


_WEIGHT = "Tensor? second, Tensor? third, Tensor? fourth, str? format"
register_operator(
    "lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, float scale, Tensor? low_down,"
    f" Tensor? low_up, {_WEIGHT}, Tensor? x_rows=None, Tensor? x_scales=None) -> (Tensor, Tensor)",
    _forward,
    meta.lora_linear,
    save=_save,
    gradients=_gradients,
)
register_operator(
    "lora_linear_backward(Tensor grad_out, Tensor x, Tensor hidden, Tensor weight, Tensor down, Tensor up, float scale,"
    f" Tensor? low_down, Tensor? low_up, {_WEIGHT}, bool of_x, bool of_down, bool of_up, Tensor? grad_rows=None,"
    " Tensor? grad_scales=None) -> (Tensor, Tensor, Tensor)",
    _backward,
    meta.lora_linear_backward,
)
