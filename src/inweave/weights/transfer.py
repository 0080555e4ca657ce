"""Host to device through pinned memory: mapped file pages go to a pinned ring, and from there to the device.

A copy straight from mapped pages is several times slower, because the driver stages it page by page. Two
buffers take turns, so that filling one overlaps with sending the other.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import numpy as np
import torch

from inweave.errors import FormatError
from inweave.weights.scratch import host_buffer

BUFFER = 64 * 1024**2
READERS = 8
SHARE = 4 * 1024**2  # below this size another thread costs more than it saves


class PinnedRing:
    """Two pinned buffers for one device; safe to use from several threads, one transfer at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="inweave-read")

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a contiguous host tensor on the device."""
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if tensor.numel() == 0:
            return out
        source, target = tensor.reshape(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
        with self._lock, torch.cuda.device(self._device):
            for start in range(0, source.numel(), BUFFER):
                piece = source[start : start + BUFFER]
                buffer, event = self._buffers[self._turn], self._events[self._turn]
                event.synchronize()  # what was last sent from this buffer has arrived
                buffer[: piece.numel()].copy_(piece)
                target[start : start + piece.numel()].copy_(buffer[: piece.numel()], non_blocking=True)
                event.record()
                self._turn ^= 1
        return out

    def send_file(self, file: BinaryIO, offset: int, length: int) -> torch.Tensor:
        """Return bytes of a file on the device: read straight into pinned memory by a few threads, never through
        a map.
        """
        out = torch.empty(length, dtype=torch.uint8, device=self._device)
        with self._lock, torch.cuda.device(self._device):
            for start in range(0, length, BUFFER):
                size = min(BUFFER, length - start)
                buffer, event = self._buffers[self._turn], self._events[self._turn]
                event.synchronize()
                _read_into(file, buffer[:size].numpy(), offset + start, self._readers)
                out[start : start + size].copy_(buffer[:size], non_blocking=True)
                event.record()
                self._turn ^= 1
        return out


def _read_into(file: BinaryIO, target: np.ndarray, offset: int, readers: ThreadPoolExecutor) -> None:
    """Fill ``target`` from a file in equal shares; the kernel copies them at the same time."""
    share = max(-(-len(target) // READERS), SHARE)
    starts = range(0, len(target), share)
    list(readers.map(lambda at: _fill(file, target[at : at + share], offset + at), starts))


def read_bytes(file: BinaryIO, offset: int, length: int) -> memoryview:
    """Return bytes of a file in new host memory, by plain reads."""
    buffer = host_buffer(length).numpy()
    _fill(file, buffer, offset)
    return buffer.data


def _fill(file: BinaryIO, target: np.ndarray, offset: int) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(file.fileno(), [target.data[done:]], offset + done)
        if count == 0:
            raise FormatError(
                f"{file.name}: ends before byte {offset + len(target):,}; it was truncated while it was read"
            )
        done += count


_rings: dict[torch.device, PinnedRing] = {}


def ring_for(device: torch.device) -> PinnedRing:
    """Return the ring of a device, created on first use and cached."""
    ring = _rings.get(device)
    if ring is None:
        ring = _rings[device] = PinnedRing(device)
    return ring
