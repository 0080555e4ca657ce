"""GEGLU and the tanh GELU for autograd; both save only their input.

geglu       an autograd function; compiled regions get the plain formula, which the compiler fuses itself
tanh_gelu   one operator each way, for eager code and compiled regions alike

Inductor computes tanh with two branches, for every column of a wider result too: on one H200 it takes 89.7 us for a
single block of Flux, [attention | gelu(x)] of 4608 x (3072 + 12288), whose memory traffic takes 67. The neighbors of
GELU are GEMMs and attention, with which Inductor fuses nothing, so the operator costs no extra traffic. After a sum by
Inductor (an adapter on the general path), x is read once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from inweave.ops.activation import meta
from inweave.ops.common.gradients import first_derivative_only
from inweave.ops.common.operators import register_operator
from inweave.ops.common.select import implementation, on_device_of

_PACKAGE = "inweave.ops.activation"


def geglu(x: Tensor) -> Tensor:
    """Return the first half of the last axis times the exact GELU of the second."""
    if torch.compiler.is_compiling():
        a, b = x.chunk(2, -1)
        return a * functional.gelu(b)
    return _Geglu.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        ctx.save_for_backward(rows)
        with on_device_of(x):
            y: Tensor = implementation(_PACKAGE, x).geglu(rows)
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        grads = dy.reshape(-1, dy.shape[-1]).contiguous()
        with on_device_of(rows):
            dx: Tensor = implementation(_PACKAGE, rows).geglu_backward(grads, rows)
        return dx.view(*dy.shape[:-1], dx.shape[1])


def tanh_gelu(x: Tensor, left: Tensor | None = None) -> Tensor:
    """Return the tanh GELU of x (..., width); with ``left`` (..., columns), [left | gelu(x)] (..., columns of both)."""
    ensure_same_rows(x, left)
    if _uses_operator(x, left):
        # matrices: if the operator returned a view, it could not be modified in place
        y: Tensor = torch.ops.inweave.tanh_gelu(_matrix(x), None if left is None else _matrix(left))
        return y.view(*x.shape[:-1], y.shape[1])
    y = functional.gelu(x, approximate="tanh")
    return y if left is None else torch.cat((left, y), -1)


def ensure_same_rows(x: Tensor, left: Tensor | None) -> None:
    """Raise ValueError unless `left` and `x` match in every dimension but the last."""
    if left is not None and left.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            "left and x must have the same shape up to their last axis, since left becomes the first columns of the "
            f"result: {tuple(left.shape)} is left of {tuple(x.shape)}"
        )


def _uses_operator(x: Tensor, left: Tensor | None) -> bool:
    """Return whether x has rows, and one dtype with ``left``."""
    return x.dim() > 0 and (left is None or left.dtype == x.dtype)


def gelu_matrix(x: Tensor, left: Tensor | None) -> Tensor:
    """Return `tanh_gelu` of matrices, without a gradient."""
    with on_device_of(x):
        y: Tensor = implementation(_PACKAGE, x).tanh_gelu(x.contiguous(), None if left is None else left.contiguous())
    return y


def gelu_matrix_gradients(dy: Tensor, x: Tensor, of_x: bool, of_left: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and left; None for a gradient that is not requested."""
    with on_device_of(x):
        dx, dleft = implementation(_PACKAGE, x).tanh_gelu_backward(dy.contiguous(), x.contiguous(), of_x, of_left)
    return dx, dleft


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def _backward(dy: Tensor, x: Tensor, of_x: bool, of_left: bool) -> tuple[Tensor, Tensor]:
    dx, dleft = gelu_matrix_gradients(dy, x, of_x, of_left)
    return x.new_empty(0) if dx is None else dx, x.new_empty(0) if dleft is None else dleft


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    of_x, of_left = ctx.needs_input_grad
    if dy is None:
        return None, None
    (x,) = ctx.saved_tensors
    dx, dleft = torch.ops.inweave.tanh_gelu_backward(dy, x, of_x, of_left)
    return dx if of_x else None, dleft if of_left else None


register_operator(
    "tanh_gelu(Tensor x, Tensor? left) -> Tensor", gelu_matrix, meta.tanh_gelu, save=_save, gradients=_gradients
)
register_operator(
    "tanh_gelu_backward(Tensor dy, Tensor x, bool of_x, bool of_left) -> (Tensor, Tensor)",
    _backward,
    meta.tanh_gelu_backward,
)
