"""Group normalization of channels-last images, with gradients of the input alone.

Only x, mean and rstd are saved for the backward pass: normalized values and SiLU are recomputed there. Where the scale
or the shift of the norm is trained, torch's own is called, which has their gradients.

eager       an autograd function, which adds the gradient of the residual branch in the backward kernel
compiled    the same kernels as one operator each way, with channels-last results
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from inweave.ops.common.gradients import are_frozen, first_derivative_only
from inweave.ops.common.layout import as_image, as_rows
from inweave.ops.common.operators import register_operator
from inweave.ops.common.select import implementation, on_device_of
from inweave.ops.group_norm import meta

_PACKAGE = "inweave.ops.group_norm"


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    *,
    silu: bool = False,
    shift: Tensor | None = None,
) -> Tensor:
    """Return the group normalization of x (batch, channels, height, width), followed by SiLU if ``silu``.

    ``shift``: (batch, channels), added to x before.
    """
    return group_norm_and_input(x, weight, bias, groups, eps, silu=silu, shift=shift)[0]


def group_norm_and_input(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    *,
    silu: bool = False,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (`group_norm`, x).

    Use the returned x in the residual branch, so that its gradient is fused into the backward kernel.
    """
    if weight is None or bias is None or x.dim() != 4 or not are_frozen(weight, bias):
        h = x if shift is None else x + shift[:, :, None, None]
        h = functional.group_norm(h, groups, weight, bias, eps)
        return functional.silu(h) if silu else h, x
    if torch.compiler.is_compiling():
        return torch.ops.inweave.group_norm(x, weight, bias, shift, groups, eps, silu)[0], x
    y, same = _GroupNorm.apply(x, weight, bias, shift, groups, eps, silu)  # type: ignore[no-untyped-call]
    return y, same


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, groups: int, eps: float, silu: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        rows = as_rows(x)
        shift = None if shift is None else shift.contiguous()
        work = implementation(_PACKAGE, x)
        with on_device_of(x):
            y, mean, rstd = work.group_norm(rows, weight, bias, shift, groups, eps, silu)
        ctx.save_for_backward(rows, weight, bias, shift, mean, rstd)
        ctx.silu = silu
        return as_image(y, x.shape), x

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor | None, more: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return more, *[None] * 6
        rows, weight, bias, shift, mean, rstd = ctx.saved_tensors
        work = implementation(_PACKAGE, rows)
        shifted = ctx.needs_input_grad[3]
        residual = as_rows(more) if more is not None and not shifted else None
        with on_device_of(rows):
            dx = work.group_norm_backward(as_rows(dy), rows, weight, bias, shift, mean, rstd, ctx.silu, residual)
        dshift = dx.sum(1, dtype=torch.promote_types(dx.dtype, torch.float32)).to(shift.dtype) if shifted else None
        if more is not None and shifted:
            dx = dx + as_rows(more)
        return as_image(dx, dy.shape), None, None, dshift, None, None, None


def _operator(
    x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shift = None if shift is None else shift.contiguous()
    with on_device_of(x):
        y, mean, rstd = implementation(_PACKAGE, x).group_norm(as_rows(x), weight, bias, shift, groups, eps, silu)
    return as_image(y, x.shape), mean, rstd


def _operator_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, mean: Tensor, rstd: Tensor, silu: bool
) -> Tensor:
    shift = None if shift is None else shift.contiguous()
    work = implementation(_PACKAGE, x)
    with on_device_of(x):
        dx = work.group_norm_backward(as_rows(dy), as_rows(x), weight, bias, shift, mean, rstd, silu, None)
    return as_image(dx, x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, shift, _, _, ctx.silu = inputs
    ctx.save_for_backward(x, weight, bias, shift, *output[1:])


def _gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    shift = ctx.saved_tensors[3]
    dx = torch.ops.inweave.group_norm_backward(dy, *ctx.saved_tensors, ctx.silu)
    dshift = (
        dx.sum((2, 3), dtype=torch.promote_types(dx.dtype, torch.float32)).to(shift.dtype)
        if ctx.needs_input_grad[3]
        else None
    )
    return dx, None, None, dshift, None, None, None


register_operator(
    "group_norm(Tensor x, Tensor weight, Tensor bias, Tensor? shift, int groups, float eps, bool silu)"
    " -> (Tensor, Tensor, Tensor)",
    _operator,
    meta.image_group_norm,
    save=_save,
    gradients=_gradients,
)
register_operator(
    "group_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor bias, Tensor? shift, Tensor mean, Tensor rstd,"
    " bool silu) -> Tensor",
    _operator_backward,
    meta.image_group_norm_backward,
)
