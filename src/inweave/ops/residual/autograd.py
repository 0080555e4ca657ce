"""The sum as one step of autograd, with one gradient for both images.

cuDNN's convolutions have no bias: torch adds it by a kernel of its own, which reads and writes the whole image once more. Here it is
added where the image is read anyway.

What follows the block in a U-Net is often a concatenation of channels, whose gradient is a slice: no channels-last image any
more. It is copied once here, and not by everyone who reads it.
"""

from __future__ import annotations

from typing import Any

import torch

from inweave.ops.common.gradients import first_derivative_only
from inweave.ops.common.layout import as_channels_last, as_image, as_rows
from inweave.ops.common.select import implementation, on_device_of


def residual_sum(a: torch.Tensor, b: torch.Tensor, *biases: torch.Tensor | None) -> torch.Tensor:
    """a + b + biases of images (batch, channels, height, width) in channels-last memory; a frozen bias is one number per channel."""
    summands = [bias for bias in biases if bias is not None]
    if torch.compiler.is_compiling():
        for bias in summands:
            b = b + bias[:, None, None]
        return a + b
    return _ResidualSum.apply(a, b, *summands)  # type: ignore[no-any-return, no-untyped-call]


class _ResidualSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, *biases: torch.Tensor) -> torch.Tensor:
        ctx.inputs = 2 + len(biases)
        one, two = as_rows(a), as_rows(b)
        if not biases or a.dtype != b.dtype:  # of two dtypes the result has the wider one
            return as_image(sum(biases, one + two), a.shape)
        work = implementation(__package__, a)
        with on_device_of(a):
            y: torch.Tensor = work.residual_sum(one, two, biases)
        return as_image(y, a.shape)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy = as_channels_last(dy)
        return dy, dy, *[None] * (ctx.inputs - 2)
