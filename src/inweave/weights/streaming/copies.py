"""Copies of blocks to the device: the seam between the ring's logic and a device's streams.

    begin    a pass begins: later copies wait for all work so far
    mark     an event: all work so far
    send     start a copy once the work before ``after`` is done; returns the event of its end
    wait     later work waits for this event
    join     later work waits for all copies

On a GPU copies run on a stream of their own, beside the work, and all of it can be recorded in a CUDA graph: the source
is page-locked, addresses never change, and every copy is joined before the pass ends. Elsewhere a copy is done at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from inweave.errors import MemoryBudgetError


class Copies(Protocol):
    """The methods of the seam; an event is anything."""

    def begin(self) -> None: ...

    def mark(self) -> Any: ...

    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any: ...

    def wait(self, event: Any) -> None: ...

    def join(self) -> None: ...


class HostCopies:
    """Copies that are done at once."""

    def begin(self) -> None:
        """Do nothing."""

    def mark(self) -> None:
        """Return no event."""

    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> None:
        """Copy now."""
        target.copy_(source)

    def wait(self, event: Any) -> None:
        """Do nothing."""

    def join(self) -> None:
        """Do nothing."""


class BlankCopies(HostCopies):
    """Copies of tensors on the meta device, which have no numbers."""

    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> None:
        """Do nothing."""


class CudaCopies:
    """Copies on a second stream; work is on the stream that is current when a method is called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Let copies wait for all work so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> torch.cuda.Event:
        """Return an event of all work so far."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def send(self, target: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None) -> torch.cuda.Event:
        """Start a copy from or to page-locked memory after an event; returns the event of its end."""
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Let later work wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def join(self) -> None:
        """Let later work wait for all copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def copies_to(device: torch.device) -> Copies:
    """Return the way to copy to a device, and back from it."""
    if device.type == "cuda":
        return CudaCopies(device)
    return BlankCopies() if device.type == "meta" else HostCopies()


def lock_pages(memory: torch.Tensor, device: torch.device) -> Callable[[], object]:
    """Page-lock host memory for a GPU; returns the function that unlocks it, which keeps the memory until then.

    It is registered: a pinned allocation of torch takes a power of two.

    Raises:
        MemoryBudgetError: the system does not lock that much.
    """
    if device.type != "cuda" or memory.numel() == 0:
        return lambda: None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code:
        raise MemoryBudgetError(
            f"{memory.numel() / 2**30:.2f} GiB of host memory cannot be page-locked for the GPU (CUDA error {code}): "
            "too little is free, or `ulimit -l` limits it; quantize the base, or give the process more memory"
        )
    return lambda: runtime.cudaHostUnregister(memory.data_ptr())
