"""Group normalization as operators of torch, so that compiled regions call it as it is; results are channels-last."""

from __future__ import annotations

from typing import Any, Optional

import torch

from inweave.ops.implementation import first_derivative_only, implementation, on_device_of
from inweave.ops.layout import as_image, as_rows

_PACKAGE = "inweave.ops.norm"


@torch.library.custom_op("inweave::group_norm", mutates_args=())
def group_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    shift: Optional[torch.Tensor],  # noqa: UP045
    groups: int,
    eps: float,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd)"""
    shift = None if shift is None else shift.contiguous()
    work = implementation(_PACKAGE, x)
    with on_device_of(x):
        y, mean, rstd = work.group_norm(as_rows(x), weight, bias, shift, groups, eps, silu)
    return as_image(y, x.shape), mean, rstd


@torch.library.custom_op("inweave::group_norm_backward", mutates_args=())
def group_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    shift: Optional[torch.Tensor],  # noqa: UP045
    mean: torch.Tensor,
    rstd: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """The gradient of x."""
    shift = None if shift is None else shift.contiguous()
    work = implementation(_PACKAGE, x)
    with on_device_of(x):
        dx = work.group_norm_backward(as_rows(dy), as_rows(x), weight, bias, shift, mean, rstd, silu, None)
    return as_image(dx, x.shape)


@group_norm.register_fake
def _(x: Any, weight: Any, bias: Any, shift: Any, groups: int, eps: float, silu: bool) -> Any:
    moments = [x.new_empty((x.shape[0], groups), dtype=torch.promote_types(x.dtype, torch.float32)) for _ in range(2)]
    return torch.empty_like(x, memory_format=torch.channels_last), *moments


@group_norm_backward.register_fake
def _(dy: Any, x: Any, weight: Any, bias: Any, shift: Any, mean: Any, rstd: Any, silu: bool) -> Any:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, shift, _, _, ctx.silu = inputs
    ctx.save_for_backward(x, weight, bias, shift, *output[1:])


@first_derivative_only
def _gradients(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    shift = ctx.saved_tensors[3]
    dx = group_norm_backward(dy, *ctx.saved_tensors, ctx.silu)
    dshift = (
        dx.sum((2, 3), dtype=torch.promote_types(dx.dtype, torch.float32)).to(shift.dtype)
        if ctx.needs_input_grad[3]
        else None
    )
    return dx, None, None, dshift, None, None, None


group_norm.register_autograd(_gradients, setup_context=_keep)
