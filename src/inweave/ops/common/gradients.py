"""Gradients of operations that kernels compute: the first derivative only, and only where it is required."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward pass so that it raises where a second derivative would be recorded (``create_graph``).

    Kernels leave no autograd history. torch's `once_differentiable` raises only if the incoming gradient itself
    requires a gradient, and ignores the saved tensors of the backward pass.
    """

    @wraps(backward)
    def refuse_or_run(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "this operation has no second derivative: call backward without create_graph, or use a network whose "
                "blocks are not fused and whose LoRAs are on the CPU, where plain torch computes them"
            )
        return backward(ctx, *grads)

    return refuse_or_run


def are_frozen(*parameters: Tensor | None) -> bool:
    """Return whether none of these requires a gradient."""
    return not any(parameter is not None and parameter.requires_grad for parameter in parameters)
