"""The sum as one autograd function, with one gradient for both images.

cuDNN's convolutions have no bias: torch adds it in a separate kernel, which reads and writes the whole image once more.
Here it is added when the image is read anyway.

In a U-Net a concatenation of channels often follows the block. Its gradient is a slice, no longer a channels-last
image, and is copied once here rather than by each of its readers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inweave.ops.common.gradients import first_derivative_only
from inweave.ops.common.layout import as_channels_last, as_image, as_rows
from inweave.ops.common.select import implementation, on_device_of


def residual_sum(a: Tensor, b: Tensor, *biases: Tensor | None) -> Tensor:
    """Return a + b + biases of channels-last images; a frozen bias is one number per channel."""
    summands = [bias for bias in biases if bias is not None]
    if torch.compiler.is_compiling():
        for bias in summands:
            b = b + bias[:, None, None]
        return a + b
    return _ResidualSum.apply(a, b, *summands)  # type: ignore[no-any-return, no-untyped-call]


class _ResidualSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, *biases: Tensor) -> Tensor:
        ctx.inputs = 2 + len(biases)
        one, two = as_rows(a), as_rows(b)
        if not biases or a.dtype != b.dtype:  # the result has the wider of two dtypes
            return as_image(sum(biases, one + two), a.shape)
        work = implementation(__package__, a)
        with on_device_of(a):
            y: Tensor = work.residual_sum(one, two, biases)
        return as_image(y, a.shape)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy = as_channels_last(dy)
        return dy, dy, *[None] * (ctx.inputs - 2)
