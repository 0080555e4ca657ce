"""The precision that references compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in float64 if it has that."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
