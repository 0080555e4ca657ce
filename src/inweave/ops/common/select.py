"""Which module of a kernel folder computes on a tensor.

CUDA, 32 bits or fewer     `triton`
meta                       `meta`: allocates what the kernels allocate, for the memory planner
everything else            `reference`
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def implementation(package: str, x: torch.Tensor) -> Any:
    """Return the module of ``package`` that computes on ``x``."""
    name = "meta" if x.is_meta else "triton" if x.is_cuda and x.dtype in _KERNEL_DTYPES else "reference"
    return import_module(f"{package}.{name}")


def on_device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on the device of ``x``: Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
