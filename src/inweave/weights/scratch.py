"""Memory that is allocated once and used for one tensor after another.

A merge needs room for one tensor in float32 and for the factors of its stack. Taking that room from `malloc` for
every tensor and giving it back fragments the heap: the weights land between temporary blocks, and
the process keeps both. So host memory comes in anonymous maps, which go back to the system as soon as nothing
refers to them, and one `Scratch` serves every tensor of a load. Other devices have allocators made for this.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from functools import cache
from typing import Any

import torch

from inweave.ops.tensors.process import available_memory

#: views start at multiples of this, for vector loads
_ALIGNMENT = 64
#: below this a block of the heap is cheaper than a map of its own
MAP_FROM = 4 * 1024**2
#: freed bytes after which the heap is trimmed
TRIM_AFTER = 32 * 1024**2
_untrimmed = 0
#: bytes that stay available
MARGIN = 128 * 1024**2
_unchecked = MARGIN


def host_buffer(size: int) -> torch.Tensor:
    """Return ``size`` bytes of new host memory, uninitialized or zero; large ones are maps of their own, never heap.

    Raises:
        MemoryError: so much is not available: the system would end the process when it is used.
    """
    if size >= MAP_FROM:
        _refuse_too_large(size)
    if size < MAP_FROM or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(size, dtype=torch.uint8)
    private = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        private.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(private, dtype=torch.uint8)


def _refuse_too_large(size: int) -> None:
    """Raise MemoryError if ``size`` bytes are not available; what is left is looked up for every `MARGIN` of bytes."""
    global _unchecked
    _unchecked += size
    if _unchecked < MARGIN:
        return
    if (left := available_memory()) is not None and size + MARGIN > left:
        raise MemoryError(f"{left / 2**30:.2f} GiB are available")
    _unchecked = 0


def trim_heap(freed: int = TRIM_AFTER) -> None:
    """Note bytes that were freed; once they are many, give the free pages of the heap back to the system.

    The C library takes blocks of up to 32 MiB from its heap once larger ones were freed, and keeps what is free between
    two blocks: a load that frees a tensor for each one that it keeps would hold both to its end.
    """
    global _untrimmed
    _untrimmed += freed
    if _untrimmed >= TRIM_AFTER and (trim := _malloc_trim()) is not None:
        _untrimmed = 0
        trim(0)


@cache
def _malloc_trim() -> Any:
    """Return glibc's function; None where there is none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):
        return None


class Scratch:
    """One growing buffer per device. Tensors from `take` are valid until the next `reset`.

    Hold ``lock`` from `reset` to the last use: one merge at a time uses the memory.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._buffers: dict[torch.device, torch.Tensor] = {}
        self._used: dict[torch.device, int] = {}

    @property
    def nbytes(self) -> int:
        """What is held at present."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def reset(self, device: torch.device, needed: int) -> None:
        """Make room for ``needed`` bytes on ``device``; everything taken before may be overwritten."""
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < needed:
            self._buffers.pop(device, None)
            del buffer  # free the old memory before allocating the new
            on_host = device.type == "cpu"
            self._buffers[device] = (
                host_buffer(needed) if on_host else torch.empty(needed, dtype=torch.uint8, device=device)
            )
        self._used[device] = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor in the room that `reset` made."""
        start = self._used[device]
        stop = start + math.prod(shape) * dtype.itemsize
        self._used[device] = start + padded_size(shape, dtype)
        return self._buffers[device][start:stop].view(dtype).view(shape)

    def release(self) -> None:
        """Give all of it back."""
        with self.lock:
            self._buffers.clear()
            self._used.clear()


def padded_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes that `take` uses for a tensor."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
