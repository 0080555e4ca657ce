"""Which module of a kernel folder computes on a tensor.

an NVIDIA GPU with Triton, 32 bits or fewer     `triton`
meta                                            `meta`: allocates what the kernels allocate, for the memory planner
everything else (cpu, mps, xpu, ROCm's "cuda")  `reference`

The rest of the package asks here, not for a tensor's `is_cuda`, whether kernels made for NVIDIA's GPUs can run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROCM = torch.version.hip is not None
_TRITON = find_spec("triton") is not None


def is_nvidia(place: Tensor | torch.device) -> bool:
    """Return whether a tensor is on an NVIDIA GPU, or a device is one: ROCm names its GPUs "cuda" too."""
    device = place if isinstance(place, torch.device) else place.device
    return device.type == "cuda" and not _ROCM


def has_kernels(place: Tensor | torch.device) -> bool:
    """Return whether Triton kernels run on the device of a tensor, or on a device."""
    return is_nvidia(place) and _TRITON


def implementation(package: str, x: Tensor) -> Any:
    """Return the module of ``package`` that computes on ``x``."""
    name = "meta" if x.is_meta else "triton" if has_kernels(x) and x.dtype in _KERNEL_DTYPES else "reference"
    return import_module(f"{package}.{name}")


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on the device of ``x``: Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
