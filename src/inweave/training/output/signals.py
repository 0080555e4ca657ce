"""Ctrl-C (or SIGTERM) once: the step is finished and saved. Twice: now. What is ignored (a shell's `&`) stays ignored."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any


class Interrupts:
    """While it lasts, signals only ask: ``ask`` is told, and returns how often that has happened."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask
        self._before: Mapping[int, Any] = {}

    def __enter__(self) -> None:
        try:
            self._before = {
                number: signal.signal(number, self._asked)
                for number in (signal.SIGINT, signal.SIGTERM)
                if signal.getsignal(number) is not signal.SIG_IGN
            }
        except ValueError:
            self._before = {}  # not the main thread: whoever started it may stop it

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self._ask() > 1:
            raise KeyboardInterrupt
