"""The sum on the meta device: exactly the memory that the kernel allocates, and no arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def residual_sum(a: torch.Tensor, b: torch.Tensor, biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `reference.residual_sum`."""
    return torch.empty_like(a)
