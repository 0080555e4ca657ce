"""Layer and RMS normalization of the last axis, with gradients of the input alone.

Saved for the backward pass: the normalized tensor's input, and one or two numbers per row. Trained weights and compiled
regions get torch's own formula, which has their gradients, and which the compiler fuses with its neighbors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from inweave.ops.common.gradients import are_frozen, first_derivative_only
from inweave.ops.common.select import implementation, on_device_of


def add_layer_norm(
    x: Tensor, added: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (x + added, its layer normalization)."""
    if _plain(weight, bias):
        total = x + added
        return total, functional.layer_norm(total, total.shape[-1:], weight, bias, eps)
    return _RowNorm.apply(x, added, weight, bias, eps, False, 1)  # type: ignore[no-any-return, no-untyped-call]


def layer_norm_and_input(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, uses: int = 1
) -> tuple[Tensor, ...]:
    """Return (x, its layer normalization ``uses`` times): all their gradients are added in one backward kernel.

    ``uses``: one to three, such as queries, keys and values.
    """
    if _plain(weight, bias):
        return x, *[functional.layer_norm(x, x.shape[-1:], weight, bias, eps)] * uses
    return _RowNorm.apply(x, None, weight, bias, eps, False, uses)  # type: ignore[no-any-return, no-untyped-call]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / sqrt(average(x^2) + eps) * weight, in float32 and rounded once."""
    if _plain(weight):
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    _, y = _RowNorm.apply(x, None, weight, None, eps, True, 1)  # type: ignore[no-untyped-call]
    return y  # type: ignore[no-any-return]


def _plain(*parameters: Tensor | None) -> bool:
    return torch.compiler.is_compiling() or not are_frozen(*parameters)


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        rms: bool,
        uses: int,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        layout = _Layout(x)
        summand = None if added is None else layout.rows(added)
        work = implementation(__package__, x)
        with on_device_of(x):
            total, y, mean, rstd = work.row_norm(layout.rows(x), summand, weight, bias, eps, rms)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.rms, ctx.layout = rms, layout
        return x if added is None else layout.whole(total), *(layout.whole(y) for _ in range(uses))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, more: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dx = more
        if dys := [ctx.layout.rows(grad) for grad in grads if grad is not None]:
            total, weight, mean, rstd = ctx.saved_tensors
            residual = None if more is None else ctx.layout.rows(more)
            work = implementation(__package__, total)
            with on_device_of(total):
                dx = work.row_norm_backward(dys, total, weight, mean, rstd, ctx.rms, residual)
            dx = ctx.layout.whole(dx)
        return dx if ctx.needs_input_grad[0] else None, dx if ctx.needs_input_grad[1] else None, *[None] * 5


class _Layout:
    """Rows in the order of memory: heads of attention, a transposed view, are not copied."""

    def __init__(self, x: Tensor) -> None:
        last, steps = x.dim() - 1, x.stride()
        self._order = [*sorted(range(last), key=lambda axis: -steps[axis]), last]
        self._back = [self._order.index(axis) for axis in range(x.dim())]
        self._shape = [x.shape[axis] for axis in self._order]

    def rows(self, x: Tensor) -> Tensor:
        """Return (rows, width), contiguous; a view if ``x`` has the memory layout of the original tensor."""
        return x.permute(self._order).contiguous().view(-1, self._shape[-1])

    def whole(self, rows: Tensor) -> Tensor:
        """Return rows in the original shape, always a view."""
        return rows.view(self._shape).permute(self._back)
