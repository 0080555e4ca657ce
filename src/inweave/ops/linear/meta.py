"""Shapes of the results of the operators on a linear layer with a LoRA, for tracing and for the meta device."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Allocate (y, S)."""
    rows = x.shape[:-1].numel()
    return x.new_empty(*x.shape[:-1], weight.shape[0]), x.new_empty(rows, down.shape[0])


def lora_linear_backward(
    grad_out: Tensor, x: Tensor, hidden: Tensor, weight: Tensor, down: Tensor, up: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate (dX, d_down, d_up); a gradient that is not requested is empty."""
    of_x, of_down, of_up = rest[7:10]  # after the scale, the rounded factors and the other parts of the weight
    return empty_like(x, of_x), empty_like(down, of_down), empty_like(up, of_up)


def empty_like(tensor: Tensor, needed: bool) -> Tensor:
    """Return a new contiguous tensor of this shape, or an empty one if it is not needed."""
    return tensor.new_empty(tensor.shape if needed else (0,))
