"""Ctrl-C (or SIGTERM) once: finish the step and save. Twice: stop now. Ignored signals (a shell's `&`) stay ignored."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any


class GracefulStop:
    """Turns signals inside the block into calls of ``request``, which returns the number of its calls."""

    def __init__(self, request: Callable[[], int]) -> None:
        self._request = request
        self._previous: Mapping[int, Any] = {}

    def __enter__(self) -> None:
        try:
            self._previous = {
                number: signal.signal(number, self._handle)
                for number in (signal.SIGINT, signal.SIGTERM)
                if signal.getsignal(number) is not signal.SIG_IGN
            }
        except ValueError:
            self._previous = {}  # not the main thread: its owner stops it

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._request() > 1:
            raise KeyboardInterrupt
