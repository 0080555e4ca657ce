"""Host to device through pinned memory: mapped file pages go to a pinned ring, and from there to the device.

A copy straight from mapped pages is several times slower, because the driver stages it page by page. Two
buffers take turns, so that filling one overlaps with sending the other.
"""

from __future__ import annotations

import threading

import torch

BUFFER = 64 * 1024**2


class PinnedRing:
    """Two pinned buffers for one device; safe to use from several threads, one transfer at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._lock = threading.Lock()

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a contiguous host tensor on the device."""
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


_rings: dict[torch.device, PinnedRing] = {}


def ring_for(device: torch.device) -> PinnedRing:
    """The ring of a device, made when first needed and kept."""
    found = _rings.get(device)
    if found is None:
        found = _rings[device] = PinnedRing(device)
    return found
