"""Shapes of the results of the operators on a linear layer with a LoRA, for tracing and for the meta device."""

from __future__ import annotations

from typing import Any

import torch


def lora_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate (y, S)."""
    rows = x.shape[:-1].numel()
    return x.new_empty(*x.shape[:-1], weight.shape[0]), x.new_empty(rows, down.shape[0])


def lora_linear_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    low_down: torch.Tensor | None,
    low_up: torch.Tensor | None,
    second: torch.Tensor | None,
    third: torch.Tensor | None,
    fourth: torch.Tensor | None,
    format: str | None,
    of_x: bool,
    of_down: bool,
    of_up: bool,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate (dX, d_down, d_up); a gradient that is not requested is empty."""
    return empty_like(x, of_x), empty_like(down, of_down), empty_like(up, of_up)


def empty_like(tensor: torch.Tensor, needed: bool) -> torch.Tensor:
    """Return a new contiguous tensor of this shape, or an empty one if it is not needed."""
    return tensor.new_empty(tensor.shape if needed else (0,))
