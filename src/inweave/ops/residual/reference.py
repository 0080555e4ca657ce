"""The sum in plain torch, in float32 at least, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from inweave.ops.common.precision import widened


def residual_sum(a: Tensor, b: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """Return a + b + biases of rows (batch, positions, channels)."""
    total = widened(a) + b
    for bias in biases:
        total = total + bias
    return total.to(a.dtype)
