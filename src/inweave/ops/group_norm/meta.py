"""Shapes of the results of group normalization: the memory that the kernels allocate and save, without arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def group_norm(
    x: Tensor, weight: Any, bias: Any, shift: Any, groups: int, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the results of `reference.group_norm`."""
    mean, rstd = (torch.empty(x.shape[0], groups, dtype=torch.float32, device=x.device) for _ in range(2))
    return torch.empty_like(x), mean, rstd


def group_norm_backward(dy: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """Allocate the result of `reference.group_norm_backward`."""
    return torch.empty_like(x)


def image_group_norm(x: Tensor, weight: Any, bias: Any, shift: Any, groups: int, *settings: Any) -> Any:
    """Allocate the results of the operator `group_norm`, which takes images (batch, channels, height, width)."""
    moments = [x.new_empty((x.shape[0], groups), dtype=torch.promote_types(x.dtype, torch.float32)) for _ in range(2)]
    return torch.empty_like(x, memory_format=torch.channels_last), *moments


def image_group_norm_backward(dy: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """Allocate the result of the operator `group_norm_backward`."""
    return torch.empty_like(x, memory_format=torch.channels_last)
