"""Host to device through pinned memory: bytes of a file go to pinned buffers, and from there to the device.

A copy straight from mapped pages is several times slower, because the driver stages it page by page. Buffers take
turns, so that filling some overlaps with sending another.

    PinnedRing   one span of bytes at a time
    stream       many spans: each buffer holds as many of them as fit, so that small tensors cost no turn of their own
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import BinaryIO, NamedTuple

import numpy as np
import torch

from inweave.errors import FormatError, MemoryBudgetError
from inweave.weights.scratch import host_buffer

BUFFER = 64 * 1024**2
READERS = 8
SHARE = 4 * 1024**2  # below this size another thread costs more than it saves
STREAM_BUFFER = 16 * 1024**2
STREAM_BUFFERS = min(12, 1 + (os.cpu_count() or 1))


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


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes of a file."""

    file: BinaryIO
    offset: int
    length: int


def stream(spans: Sequence[FileSpan], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the bytes of each span on a device, in order; every thread reads ahead into a buffer of its own.

    Spans that follow each other in a file are read together. A read is large, so that threads seldom need the
    interpreter: it is busy with the tensors.
    """
    pinned = device.type == "cuda"
    loads = list(_loads(spans))
    count = min(len(loads), STREAM_BUFFERS)
    buffers = [torch.empty(STREAM_BUFFER, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
    sent = [torch.cuda.Event() for _ in buffers] if pinned else []  # type: ignore[no-untyped-call]
    filling = deque[Future[None]]()

    def fill(number: int) -> None:
        if number < len(loads):
            turn = number % count
            if pinned:
                sent[turn].synchronize()  # what was last sent from this buffer has arrived
            filling.append(_readers().submit(_fill_all, loads[number].reads, buffers[turn].numpy()))

    out = torch.empty(0)
    try:
        for number in range(count - 1):
            fill(number)
        for number, load in enumerate(loads):
            fill(number + max(count - 1, 0))  # its buffer was sent a turn ago
            filling[0].result()
            filling.popleft()
            finished, buffer = list[torch.Tensor](), buffers[number % count]
            for at, length, start, size in load.parts:
                if start == 0:
                    out = torch.empty(size, dtype=torch.uint8, device=device)
                (out if length == size else out[start : start + length]).copy_(
                    buffer[at : at + length], non_blocking=True
                )
                if start + length == size:
                    finished.append(out)
            if pinned:
                sent[number % count].record()
            yield from finished
    finally:
        wait(filling)  # they write to the buffers


class _Load(NamedTuple):
    """What one buffer holds. ``parts``: (place in the buffer, bytes, place in the span, bytes of the span)."""

    parts: list[tuple[int, int, int, int]]
    reads: list[tuple[BinaryIO, int, int, int]]  # file, offset, from and to in the buffer


def _loads(spans: Sequence[FileSpan]) -> Iterator[_Load]:
    load, at = _Load([], []), 0
    for span in spans:
        start = 0
        while start < span.length or span.length == start == 0:
            length = min(span.length - start, STREAM_BUFFER - at)
            load.parts.append((at, length, start, span.length))
            _add_read(load.reads, span.file, span.offset + start, at, at + length)
            start, at = start + length, at + length
            if at == STREAM_BUFFER:
                yield load
                load, at = _Load([], []), 0
            if span.length == 0:
                break
    if load.parts:
        yield load


def _add_read(reads: list[tuple[BinaryIO, int, int, int]], file: BinaryIO, offset: int, at: int, end: int) -> None:
    """Add a range of a file to the reads of a buffer, to the last one if it continues that."""
    if reads and reads[-1][0] is file and reads[-1][1] + at - reads[-1][2] == offset:
        _, offset, at, _ = reads.pop()
    reads.append((file, offset, at, end))


def _fill_all(reads: Sequence[tuple[BinaryIO, int, int, int]], target: np.ndarray) -> None:
    for file, offset, at, end in reads:
        _fill(file, target[at:end], offset)


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(STREAM_BUFFERS, thread_name_prefix="inweave-stream")


def _read_into(file: BinaryIO, target: np.ndarray, offset: int, readers: ThreadPoolExecutor) -> None:
    """Fill ``target`` from a file in equal shares; the kernel copies them at the same time."""
    share = max(-(-len(target) // READERS), SHARE)
    if len(target) <= share:
        _fill(file, target, offset)
        return
    starts = range(0, len(target), share)
    list(readers.map(lambda at: _fill(file, target[at : at + share], offset + at), starts))


def read_bytes(file: BinaryIO, offset: int, length: int) -> memoryview:
    """Return bytes of a file in new host memory, by plain reads."""
    try:
        buffer = host_buffer(length).numpy()
    except (OSError, MemoryError, RuntimeError) as error:
        raise MemoryBudgetError(
            f"{file.name}: not enough host memory to read {length / 2**20:,.0f} MiB of it ({error}); quantize the "
            "base, close other programs, or use a smaller model"
        ) from None
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
