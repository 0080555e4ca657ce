"""Signals inside the web process, for readers of a job's events and for dispatchers that wait for work.

Those of other processes come from the database (`receive`).

Signals carry no data: a waiter that wakes up reads the store, so a signal that comes twice or too early does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict

#: what is sent to other processes when a job may be waiting; otherwise it is the id of a job that changed
WORK = "work"
#: the same when a LoRA was added or removed
LIBRARY = "library"


class JobSignals:
    """Wakes waiters in the event loop it was made in."""

    def __init__(self) -> None:
        self._readers: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._workers: set[asyncio.Event] = set()

    def changed(self, job: str) -> None:
        """Wake the readers of a job."""
        for event in self._readers.get(job, ()):
            event.set()

    def receive(self, text: str) -> None:
        """Wake those whom a signal of another process concerns; "": some signals may have been missed."""
        if text in ("", WORK):
            self.work()
        for job in list(self._readers) if text == "" else [text]:
            self.changed(job)

    def work(self) -> None:
        """Wake the dispatchers: there may be a job to run."""
        for event in self._workers:
            event.set()

    async def wait_for_change(self, job: str, seconds: float) -> bool:
        """Wait until something happens to a job; return False if nothing did within ``seconds``."""
        event = asyncio.Event()
        self._readers[job].add(event)
        try:
            return await wait_seconds(event, seconds)
        finally:
            self._readers[job].discard(event)
            if not self._readers[job]:
                del self._readers[job]

    async def wait_for_work(self, seconds: float) -> bool:
        """Wait until there may be a job to run; return False after ``seconds`` without a signal."""
        event = asyncio.Event()
        self._workers.add(event)
        try:
            return await wait_seconds(event, seconds)
        finally:
            self._workers.discard(event)


async def wait_seconds(event: asyncio.Event, seconds: float) -> bool:
    """Return whether an event came in time.

    `asyncio.wait_for` of Python 3.11 drops a cancellation that comes together with the event.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
        return True
    return False
