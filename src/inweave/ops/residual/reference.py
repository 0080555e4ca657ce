"""The sum in plain torch, in float32 at least, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def residual_sum(a: torch.Tensor, b: torch.Tensor, biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """a + b + biases of rows (batch, positions, channels)."""
    total = a.to(torch.promote_types(a.dtype, torch.float32)) + b
    for bias in biases:
        total = total + bias
    return total.to(a.dtype)
