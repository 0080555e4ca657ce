"""The precision that references compute in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in float64 if it has that."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that computes a weight: in the dtypes of its tensors, wherever it is called."""

    @wraps(function)
    def exact(*args: P.args, **kwargs: P.kwargs) -> R:
        accelerator = torch.accelerator.current_accelerator()
        device = "cpu" if accelerator is None else accelerator.type
        with torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return exact
