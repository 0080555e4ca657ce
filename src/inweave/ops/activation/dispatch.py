"""GEGLU as one step of autograd that stores its input alone; a compiled region gets the plain formula and fuses it itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from inweave.ops.implementation import first_derivative_only, implementation, on_device_of


def geglu(x: torch.Tensor) -> torch.Tensor:
    """The first half of the last axis times the exact GELU of the second."""
    if torch.compiler.is_compiling():
        a, b = x.chunk(2, -1)
        return a * functional.gelu(b)
    return _Geglu.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        ctx.save_for_backward(rows)
        work = implementation(__package__, x)
        with on_device_of(x):
            y: torch.Tensor = work.geglu(rows)
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (rows,) = ctx.saved_tensors
        grads = dy.reshape(-1, dy.shape[-1]).contiguous()
        work = implementation(__package__, rows)
        with on_device_of(rows):
            dx: torch.Tensor = work.geglu_backward(grads, rows)
        return dx.view(*dy.shape[:-1], dx.shape[1])
