"""The operation for autograd: a function for eager mode and CUDA graphs, an operator for compiled regions.

    eager      `autograd.Function`: gradients of the factors go straight into the buffers of `Rounded.grads`
    compiled   `torch.ops.inweave.lora_linear` with its own gradient; the factors' gradients are returned

A compiled operator must not write to views of one buffer: Inductor copies such an argument from the start of its storage, at
the offset that it had in the block that was compiled, and torch before 2.13 adds that offset twice, which is out of bounds.

Where W is in 8 bits, compiled regions quantize x and dY in plain operations, for the compiler to put where these are made, and give the
operator both forms of them: the adapter is multiplied in 16 bits.

Both run the operator's forward, so that selective checkpointing sees one product whose result it can store. What nobody
needs is not computed: no dX where x needs no gradient, nothing for frozen factors. A second derivative raises an error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from inweave.ops.fp8 import traced_rows
from inweave.ops.implementation import first_derivative_only
from inweave.ops.linear.dispatch import backward, forward
from inweave.ops.linear.frozen import Weight, rows_of, tensors_of, traced_input, weight_of


class Rounded(NamedTuple):
    """A factor's copy in the dtype of the inputs, valid for one forward and backward pass.

    ``grads``: a buffer like the factor, float32: eager backward passes add to it and leave the factor's `.grad` alone.
    """

    values: torch.Tensor
    grads: torch.Tensor | None = None


def rounded_values(factor: torch.Tensor, rounded: Rounded | None, dtype: torch.dtype) -> torch.Tensor:
    """A factor in the dtype of the inputs."""
    return factor.to(dtype) if rounded is None else rounded.values


def gradient_buffers(*rounded: Rounded | None) -> tuple[torch.Tensor | None, ...]:
    """Where gradients of these factors are added up; None where autograd gets them."""
    return tuple(None if each is None else each.grads for each in rounded)


def lora_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    *,
    rounded_down: Rounded | None = None,
    rounded_up: Rounded | None = None,
) -> torch.Tensor:
    """x W^T + b + scale (x down^T) up^T for x (..., K), with gradients for x, ``down`` and ``up``; W and b are frozen.

    x, W and b have one dtype, unless W is in 8 bits; the factors are rounded to it, once, unless `Rounded` copies are given.
    """
    own, *scales = tensors_of(weight)
    if torch.compiler.is_compiling():
        low_down = None if rounded_down is None else rounded_down.values
        low_up = None if rounded_up is None else rounded_up.values
        y: torch.Tensor = torch.ops.inweave.lora_linear(
            x, own, bias, down, up, scale, low_down, low_up, *scales, *traced_input(x, weight)
        )[0]
        return y
    result: torch.Tensor = _LoraLinear.apply(x, own, bias, down, up, scale, rounded_down, rounded_up, *scales)  # type: ignore[no-untyped-call]
    return result


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scale: float,
        rounded_down: Rounded | None,
        rounded_up: Rounded | None,
        *scales: torch.Tensor | None,
    ) -> torch.Tensor:
        low_down, low_up = rounded_values(down, rounded_down, x.dtype), rounded_values(up, rounded_up, x.dtype)
        with torch._C._AutoDispatchBelowAutograd():  # gradients are this function's
            y: torch.Tensor
            y, hidden = torch.ops.inweave.lora_linear(x, weight, bias, low_down, low_up, scale, None, None, *scales)
        of_x, _, _, of_down, of_up = ctx.needs_input_grad[:5]
        ctx.save_for_backward(
            x if of_down else None, hidden if of_up else None, low_down, low_up, *((weight, *scales) if of_x else ())
        )
        ctx.scale = scale
        ctx.dtypes = down.dtype, up.dtype
        ctx.grads = gradient_buffers(rounded_down, rounded_up)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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
            grad_out, grad_out if x is None else x, hidden, weight_of(*weight) if weight else None, down, up, ctx.scale,
            grad_x=of_x, grad_down=into_down, grad_up=into_up, fresh=fresh,
        )  # fmt: skip
        return grad_x, None, None, grads[0], grads[1], None, None, None, None, None, None


# the operators

torch.library.define(
    "inweave::lora_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, float scale, Tensor? low_down, Tensor? low_up,"
    " Tensor? row_scales, Tensor? columns, Tensor? column_scales, Tensor? x_rows=None, Tensor? x_scales=None)"
    " -> (Tensor, Tensor)",
)
torch.library.define(
    "inweave::lora_linear_backward",
    "(Tensor grad_out, Tensor x, Tensor hidden, Tensor weight, Tensor down, Tensor up, float scale, Tensor? low_down,"
    " Tensor? low_up, Tensor? row_scales, Tensor? columns, Tensor? column_scales, bool of_x, bool of_down, bool of_up,"
    " Tensor? grad_rows=None, Tensor? grad_scales=None) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("inweave::lora_linear", "default")
def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    low_down: torch.Tensor | None,
    low_up: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    columns: torch.Tensor | None,
    column_scales: torch.Tensor | None,
    x_rows: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return forward(
        x, weight_of(weight, row_scales, columns, column_scales), bias,
        down.to(x.dtype) if low_down is None else low_down, up.to(x.dtype) if low_up is None else low_up, scale,
        rows_of(x_rows, x_scales),
    )  # fmt: skip


def _forward_shapes(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    low_down: torch.Tensor | None,
    low_up: torch.Tensor | None,
    *quantized: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[:-1].numel()
    return x.new_empty(*x.shape[:-1], weight.shape[0]), x.new_empty(rows, down.shape[0])


@torch.library.impl("inweave::lora_linear_backward", "default")
def _backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    low_down: torch.Tensor | None,
    low_up: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    columns: torch.Tensor | None,
    column_scales: torch.Tensor | None,
    of_x: bool,
    of_down: bool,
    of_up: bool,
    grad_rows: torch.Tensor | None = None,
    grad_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_down, grad_up = (_empty(like, needed) for like, needed in ((down, of_down), (up, of_up)))
    grad_x = backward(
        grad_out, x, hidden, weight_of(weight, row_scales, columns, column_scales),
        down.to(x.dtype) if low_down is None else low_down, up.to(x.dtype) if low_up is None else low_up, scale,
        grad_x=of_x, grad_down=grad_down if of_down else None, grad_up=grad_up if of_up else None, fresh=True,
        quantized=rows_of(grad_rows, grad_scales),
    )  # fmt: skip
    return _empty(x, False) if grad_x is None else grad_x, grad_down, grad_up


def _backward_shapes(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    low_down: torch.Tensor | None,
    low_up: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    columns: torch.Tensor | None,
    column_scales: torch.Tensor | None,
    of_x: bool,
    of_down: bool,
    of_up: bool,
    grad_rows: torch.Tensor | None = None,
    grad_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(x, of_x), _empty(down, of_down), _empty(up, of_up)


def _empty(like: torch.Tensor, needed: bool) -> torch.Tensor:
    return like.new_empty(like.shape if needed else (0,))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _, down, up, scale, low_down, low_up, *scales, x_rows, _ = inputs
    ctx.quantizes = x_rows is not None
    ctx.save_for_backward(x, output[1], weight, down, up, low_down, low_up, *scales)
    ctx.scale = scale
    ctx.set_materialize_grads(False)


@first_derivative_only
def _gradients(ctx: Any, grad_out: torch.Tensor | None, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 13
    x, hidden, weight, down, up, low_down, low_up, *scales = ctx.saved_tensors
    of_x, _, _, of_down, of_up = ctx.needs_input_grad[:5]
    quantized = traced_rows(grad_out) if ctx.quantizes and of_x else (None, None)
    grad_x, grad_down, grad_up = torch.ops.inweave.lora_linear_backward(
        grad_out, x, hidden, weight, down, up, ctx.scale, low_down, low_up, *scales, of_x, of_down, of_up, *quantized
    )
    factors = grad_down if of_down else None, grad_up if of_up else None
    return grad_x if of_x else None, None, None, *factors, *[None] * 8


torch.library.register_fake("inweave::lora_linear", _forward_shapes)
torch.library.register_fake("inweave::lora_linear_backward", _backward_shapes)
torch.library.register_autograd("inweave::lora_linear", _gradients, setup_context=_save)
