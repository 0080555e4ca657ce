"""Layer and RMS normalization of the last axis, with gradients of the input alone.

Stored for the backward pass: what was normalized, and one or two numbers per row. Trained weights and compiled regions
get torch's own formula: it has their gradients, and the compiler fuses it with what is around it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from inweave.ops.implementation import frozen, implementation, on_device_of


def add_layer_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + added, its layer normalization)"""
    if _plain(weight, bias):
        total = x + added
        return total, functional.layer_norm(total, total.shape[-1:], weight, bias, eps)
    return _RowNorm.apply(x, added, weight, bias, eps, False)  # type: ignore[no-any-return, no-untyped-call]


def layer_norm_and_input(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, its layer normalization): whoever uses this x has its gradient added in the backward kernel."""
    if _plain(weight, bias):
        return x, functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return _RowNorm.apply(x, None, weight, bias, eps, False)  # type: ignore[no-any-return, no-untyped-call]


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(average(x^2) + eps) * weight, in float32 and rounded once."""
    if _plain(weight):
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    _, y = _RowNorm.apply(x, None, weight, None, eps, True)  # type: ignore[no-untyped-call]
    return y  # type: ignore[no-any-return]


def _plain(*parameters: torch.Tensor | None) -> bool:
    return torch.compiler.is_compiling() or not frozen(*parameters)


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        added: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        rms: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        summand = None if added is None else _rows(added)
        work = implementation(__package__, x)
        with on_device_of(x):
            total, y, mean, rstd = work.row_norm(_rows(x), summand, weight, bias, eps, rms)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.rms = rms
        return x if added is None else total.view(x.shape), y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, more: torch.Tensor | None, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        dx = more
        if dy is not None:
            total, weight, mean, rstd = ctx.saved_tensors
            residual = None if more is None else _rows(more)
            work = implementation(__package__, total)
            with on_device_of(total):
                dx = work.row_norm_backward(_rows(dy), total, weight, mean, rstd, ctx.rms, residual).view(dy.shape)
        return dx if ctx.needs_input_grad[0] else None, dx if ctx.needs_input_grad[1] else None, None, None, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
