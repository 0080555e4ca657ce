"""The GELU with tanh as one operator of torch each way, for eager code and compiled regions alike, which stores its input alone.

Inductor computes tanh itself by two branches, for every column of a wider result too: on one H200 89.7 us for a single block of Flux,
[attention | gelu(x)] of 4608 x (3072 + 12288), whose bytes take 67. Around the operator stand products and attention, with which
Inductor fuses nothing: bytes are the same with it. Behind a sum that Inductor makes (an adapter by the general path) x is read once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from inweave.ops.implementation import first_derivative_only, implementation, on_device_of

_PACKAGE = "inweave.ops.activation"


def tanh_gelu(x: torch.Tensor, left: torch.Tensor | None = None) -> torch.Tensor:
    """GELU of x (..., width), by tanh; with ``left`` (..., columns) [left | gelu(x)] (..., columns of both)."""
    ensure_same_rows(x, left)
    if _uses_operator(x, left):
        # matrices: what an operator returns as a view could not be changed in place
        y: torch.Tensor = torch.ops.inweave.tanh_gelu(_matrix(x), None if left is None else _matrix(left))
        return y.view(*x.shape[:-1], y.shape[1])
    y = functional.gelu(x, approximate="tanh")
    return y if left is None else torch.cat((left, y), -1)


def ensure_same_rows(x: torch.Tensor, left: torch.Tensor | None) -> None:
    """Refuse what cannot stand left of x, or of something with its rows."""
    if left is not None and left.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            "left and x must have the same shape up to their last axis, since left becomes the first columns of the result: "
            f"{tuple(left.shape)} is left of {tuple(x.shape)}"
        )


def _uses_operator(x: torch.Tensor, left: torch.Tensor | None) -> bool:
    """Whether it has rows, and the result the dtype of both."""
    return x.dim() > 0 and (left is None or left.dtype == x.dtype)


def gelu_matrix(x: torch.Tensor, left: torch.Tensor | None) -> torch.Tensor:
    """`tanh_gelu` of matrices, without a gradient."""
    with on_device_of(x):
        y: torch.Tensor = implementation(_PACKAGE, x).tanh_gelu(
            x.contiguous(), None if left is None else left.contiguous()
        )
    return y


def gelu_matrix_gradients(
    dy: torch.Tensor, x: torch.Tensor, of_x: bool, of_left: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of both."""
    with on_device_of(x):
        dx, dleft = implementation(_PACKAGE, x).tanh_gelu_backward(dy.contiguous(), x.contiguous(), of_x, of_left)
    return dx, dleft


# the operators

torch.library.define("inweave::tanh_gelu", "(Tensor x, Tensor? left) -> Tensor")
torch.library.define(
    "inweave::tanh_gelu_backward", "(Tensor dy, Tensor x, bool of_x, bool of_left) -> (Tensor, Tensor)"
)


@torch.library.impl("inweave::tanh_gelu", "default")
def _forward(x: torch.Tensor, left: torch.Tensor | None) -> torch.Tensor:
    return gelu_matrix(x, left)


def _forward_shape(x: torch.Tensor, left: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] + (0 if left is None else left.shape[1]))


@torch.library.impl("inweave::tanh_gelu_backward", "default")
def _backward(dy: torch.Tensor, x: torch.Tensor, of_x: bool, of_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dleft = gelu_matrix_gradients(dy, x, of_x, of_left)
    return x.new_empty(0) if dx is None else dx, x.new_empty(0) if dleft is None else dleft


def _backward_shapes(dy: torch.Tensor, x: torch.Tensor, of_x: bool, of_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    columns = dy.shape[1] - x.shape[1]
    return x.new_empty(x.shape if of_x else (0,)), x.new_empty((x.shape[0], columns) if of_left else (0,))


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.set_materialize_grads(False)


@first_derivative_only
def _gradients(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    of_x, of_left = ctx.needs_input_grad
    if dy is None:
        return None, None
    (x,) = ctx.saved_tensors
    dx, dleft = torch.ops.inweave.tanh_gelu_backward(dy, x, of_x, of_left)
    return dx if of_x else None, dleft if of_left else None


torch.library.register_fake("inweave::tanh_gelu", _forward_shape)
torch.library.register_fake("inweave::tanh_gelu_backward", _backward_shapes)
torch.library.register_autograd("inweave::tanh_gelu", _gradients, setup_context=_save)
