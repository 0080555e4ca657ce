"""Shapes of the results of the attention operators, in the layout (batch, sequence, heads, size)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Allocate (out, lse)."""
    return empty_sequence_first(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate (dq, dk, dv)."""
    return empty_sequence_first(q), empty_sequence_first(k), empty_sequence_first(v)


def empty_sequence_first(tensor: Tensor) -> Tensor:
    """Allocate a tensor of this shape (batch, heads, sequence, size) in the layout of the results."""
    batch, heads, rows, size = tensor.shape
    return tensor.new_empty((batch, rows, heads, size)).transpose(1, 2)
