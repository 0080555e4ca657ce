"""Which of a package's implementations computes on a tensor: kernels, the plain reference, or allocations alone.

CUDA, 32 bits or fewer     `triton`
meta                       `outline`: the memory that the kernels use, for the planner
everything else            `reference`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from importlib import import_module
from typing import Any

import torch

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def implementation(package: str, x: torch.Tensor) -> Any:
    """The module of ``package`` that works on ``x``."""
    name = "outline" if x.is_meta else "triton" if x.is_cuda and x.dtype in _KERNEL_DTYPES else "reference"
    return import_module(f"{package}.{name}")


def on_device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """A kernel is launched on the current device, whichever has its tensors."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that refuses to be recorded for a second derivative (``create_graph``).

    Kernels leave no history. torch's `once_differentiable` raises an error only where the incoming gradient needs a gradient itself,
    and passes over what the backward pass has stored.
    """

    @wraps(backward)
    def refuse_or_run(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "this operation has no second derivative: call backward without create_graph, or use a network whose blocks are "
                "not fused and whose LoRAs are on the CPU, where plain torch computes them"
            )
        return backward(ctx, *grads)

    return refuse_or_run


def frozen(*parameters: torch.Tensor | None) -> bool:
    """Whether nobody asks for the gradients of these."""
    return not any(parameter is not None and parameter.requires_grad for parameter in parameters)
