"""The time that retention compares with: a jump of the system's clock forward makes nothing expire.

    age clock = min(system clock, system clock when the process started + time that has passed since)

A result that was stored before a jump forward has the age that has really passed; one that was stored after it, or
before a jump back, is kept longer, within the limits of size. Stamps that people read are the system's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_since_boot() -> float:
    """Return a time that no one sets; where the system has it, one that also counts while the machine is suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class AgeClock:
    """The age clock of a process."""

    def __init__(
        self, clock: Callable[[], float] = time.time, steady: Callable[[], float] = seconds_since_boot
    ) -> None:
        self._clock, self._steady = clock, steady
        self._offset = clock() - steady()

    def __call__(self) -> float:
        return min(self._clock(), self._steady() + self._offset)
