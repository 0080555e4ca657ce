"""Group normalization of channels-last images, with gradients of the input alone.

Only x, mean and rstd are stored for the backward pass: normalized values and SiLU are recomputed there. Where the scale
or the shift of the norm is trained, torch's own is called, which has their gradients. Inside of `torch.compile` the same
kernels are one operator each way (`compiled`), with channels-last results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from inweave.ops.implementation import first_derivative_only, frozen, implementation, on_device_of
from inweave.ops.layout import as_image, as_rows


def group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    eps: float,
    *,
    silu: bool = False,
    shift: torch.Tensor | None = None,
) -> torch.Tensor:
    """Group normalization of x (batch, channels, height, width), with SiLU after it if asked for.

    ``shift``: (batch, channels), added to x before.
    """
    return group_norm_and_input(x, weight, bias, groups, eps, silu=silu, shift=shift)[0]


def group_norm_and_input(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    eps: float,
    *,
    silu: bool = False,
    shift: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the same, x): whoever uses this x has its gradient added in the backward kernel instead of by one of its own."""
    if weight is None or bias is None or x.dim() != 4 or not frozen(weight, bias):
        h = x if shift is None else x + shift[:, :, None, None]
        h = functional.group_norm(h, groups, weight, bias, eps)
        return functional.silu(h) if silu else h, x
    if torch.compiler.is_compiling():
        from inweave.ops.norm import compiled

        return compiled.group_norm(x, weight, bias, shift, groups, eps, silu)[0], x
    y, same = _GroupNorm.apply(x, weight, bias, shift, groups, eps, silu)  # type: ignore[no-untyped-call]
    return y, same


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        shift: torch.Tensor | None,
        groups: int,
        eps: float,
        silu: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        rows = as_rows(x)
        shift = None if shift is None else shift.contiguous()
        work = implementation(__package__, x)
        with on_device_of(x):
            y, mean, rstd = work.group_norm(rows, weight, bias, shift, groups, eps, silu)
        ctx.save_for_backward(rows, weight, bias, shift, mean, rstd)
        ctx.silu = silu
        return as_image(y, x.shape), x

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: torch.Tensor | None, more: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return more, *[None] * 6
        rows, weight, bias, shift, mean, rstd = ctx.saved_tensors
        work = implementation(__package__, rows)
        shifted = ctx.needs_input_grad[3]
        residual = as_rows(more) if more is not None and not shifted else None
        with on_device_of(rows):
            dx = work.group_norm_backward(as_rows(dy), rows, weight, bias, shift, mean, rstd, ctx.silu, residual)
        dshift = dx.sum(1, dtype=torch.promote_types(dx.dtype, torch.float32)).to(shift.dtype) if shifted else None
        if more is not None and shifted:
            dx = dx + as_rows(more)
        return as_image(dx, dy.shape), None, None, dshift, None, None, None
