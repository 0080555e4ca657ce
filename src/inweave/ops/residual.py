"""The sum at the end of a residual block of images, with one gradient for both of its summands.

What follows the block in a U-Net is often a concatenation of channels, whose gradient is a slice: no channels-last image any
more. It is copied once here, and not by everyone who reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def residual_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b of images (batch, channels, height, width) in channels-last memory."""
    if torch.compiler.is_compiling():
        return a + b
    return _ResidualSum.apply(a, b)  # type: ignore[no-any-return, no-untyped-call]


class _ResidualSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dy = dy.contiguous(memory_format=torch.channels_last)
        return dy, dy
