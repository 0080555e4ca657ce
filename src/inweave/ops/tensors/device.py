"""Devices and dtypes by name, as options and settings spell them: auto, cpu, cuda, cuda:1; fp32, fp16, bf16.

Every device is accepted on which torch computes: mps, xpu, and ROCm's GPUs, which are called cuda. inweave was tested
on CPUs and NVIDIA GPUs; elsewhere it runs in plain torch, without its kernels, and says so (`device_note`).
"""

from __future__ import annotations

import os
from typing import Any

import torch

from inweave.errors import ConfigError
from inweave.ops.common.select import is_nvidia

DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "float16": torch.float16, "fp16": torch.float16,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
}  # fmt: skip


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the device; by default (None or "auto") a CUDA or ROCm GPU if there is one.

    Raises:
        ConfigError: if this machine does not have the device.
    """
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"no device is called {device!r}; use cpu, cuda, cuda:N, mps or xpu") from None
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("this machine has no CUDA device; use the device cpu")
        if chosen.index is not None and chosen.index >= (count := torch.cuda.device_count()):
            raise ConfigError(f"{device}: this machine has {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    elif chosen.type != "cpu":
        try:
            torch.ones(2, device=chosen).sum().item()
        except Exception as error:  # torch has a different one for each device it was built without
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"{device}: torch {torch.__version__} cannot compute on it: {reason}") from None
    return chosen


def all_devices() -> tuple[str, ...]:
    """Return the names of the GPUs of this machine; without one, the CPU."""
    return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count())) or ("cpu",)


def device_note(device: torch.device) -> str | None:
    """Return what to say about a device on which inweave was not tested; None for CPUs and NVIDIA GPUs."""
    if device.type == "cpu" or is_nvidia(device):
        return None
    name = f"{device} (ROCm)" if device.type == "cuda" else str(device)
    return f"{name}: inweave was not tested on this device; it computes in plain torch, without kernels of its own"


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype of this name; by default (None or "auto") the one that suits the device."""
    if dtype is not None and dtype != "auto":
        return named_dtype(dtype)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def named_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the dtype of this name; a dtype is returned unchanged."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError(f"no dtype is called {dtype!r}; known are {', '.join(DTYPES)}")
    return DTYPES[dtype]


def device_memory(device: torch.device) -> dict[str, Any]:
    """Return the kind, the name and the memory of a device: kind, name, total_bytes, free_bytes."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {"kind": "cuda", "name": torch.cuda.get_device_name(device), "total_bytes": total, "free_bytes": free}
    if device.type == "xpu":
        free, total = torch.xpu.mem_get_info(device)
        return {"kind": "xpu", "name": torch.xpu.get_device_name(device), "total_bytes": total, "free_bytes": free}
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    return {"kind": device.type, "name": device.type, "total_bytes": total, "free_bytes": free}


def limit_threads(count: int) -> None:
    """Let this process compute on ``count`` threads of the CPU at most, unless OMP_NUM_THREADS decides that."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(count, torch.get_num_threads()))


def allocator_bytes(device: str | torch.device) -> tuple[int, int, int] | None:
    """Return the bytes of tensors, those that torch holds for them, and all of the device; None where torch has none.

    It asks torch's allocator alone and takes microseconds, so it may be called for every step.
    """
    device = torch.device(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total
    if device.type == "xpu":
        total = torch.xpu.get_device_properties(device).total_memory
        return torch.xpu.memory_allocated(device), torch.xpu.memory_reserved(device), total
    return None
