"""Shapes of the results of the attention operators, in the layout (batch, sequence, heads, size)."""

from __future__ import annotations

from typing import Any

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate (out, lse)."""
    return _sequence_first(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate (dq, dk, dv)."""
    return _sequence_first(q), _sequence_first(k), _sequence_first(v)


def _sequence_first(tensor: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, size = tensor.shape
    return tensor.new_empty((batch, rows, heads, size)).transpose(1, 2)
