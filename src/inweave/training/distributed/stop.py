"""Stopping a run on request: one process may get the request, and all of them have to agree on the step.

Ctrl-C (or SIGTERM) once: finish the step and save. Twice: stop now. Ignored signals (a shell's `&`) stay ignored.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

import torch

from inweave.training.distributed.world import World

POLL_SECONDS = 4.0  # between two votes of several processes: launchers kill after 30 seconds


class StopVote:
    """Counts requests to stop, signals inside the block among them; all processes stop after the same step."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._world, self._device = world, device
        self._requests = 0
        self._next_poll, self._last_poll = 0, (0, time.perf_counter())
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> None:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._handle)
        except ValueError:
            pass  # not the main thread: its owner stops it

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request()
        if self._requests > 1:
            raise KeyboardInterrupt

    def request(self) -> None:
        """Request a stop after the current step."""
        self._requests += 1

    def agreed(self, step: int) -> bool:
        """Return whether to stop before ``step``; several processes vote only every few seconds."""
        if self._world.size > 1:
            if step < self._next_poll:
                return False
            now = time.perf_counter()
            done, seconds = step - self._last_poll[0], now - self._last_poll[1]
            steps = int(POLL_SECONDS * done / max(seconds, 1e-9))
            self._next_poll = step + self._world.least(max(min(steps, 100), 1), self._device)
            self._last_poll = step, now
        return self._world.any(self._requests > 0, self._device)
