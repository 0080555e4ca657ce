"""Calls into the processes that plan training: how images will be cropped, and how much memory and time a run needs.

A process is started by a call that finds none idle, answers one call at a time, and ends after a while without calls. A
call that takes too long, or more memory than `planner.process` allows, fails alone: nobody waits for it but its caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from inweave.errors import BusyError, RequestError
from inweave.serve.engine.child_process import CallProcess
from inweave.serve.engine.wire import WireError

IDLE_SECONDS = 60.0
PROCESSES = 2
MAX_WAITING = 8


class PlannerClient:
    """A few processes; each call waits for an idle one, the one used last first."""

    def __init__(self, seconds: float = 60.0, processes: int = PROCESSES, private: Sequence[str] = ()) -> None:
        self._seconds = seconds
        self._processes = [
            CallProcess("inweave.serve.planner.process", {"private": [*private]}) for _ in range(processes)
        ]
        self._idle = asyncio.LifoQueue[CallProcess]()
        for each in reversed(self._processes):
            self._idle.put_nowait(each)
        self._calls = 0
        self._stop = asyncio.Lock()
        self._end: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    async def call(self, name: str, data: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a call of `planner.process`, and raise the error it reports."""
        if self._calls >= MAX_WAITING:
            raise BusyError("many training plans are being made; ask again in a moment")
        self._calls += 1
        self._keep_processes()
        try:
            process = await self._idle.get()
            try:
                return await process.call(name, data, self._seconds)
            finally:
                self._idle.put_nowait(process)
        except TimeoutError:
            raise RequestError(
                f"the plan took longer than {self._seconds:g} s; plan a smaller run, or use inweave train --check"
            ) from None
        except WireError:
            raise RequestError(
                "the plan could not be made: its process ended unexpectedly; the log of the worker may say why"
            ) from None
        finally:
            self._calls -= 1
            self._keep_processes()
            self._end = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.release)

    def release(self) -> None:
        """End the processes soon: a run that starts now needs the memory they hold."""
        self._closing = asyncio.ensure_future(self.close())

    async def close(self) -> None:
        """End the processes, each once it has answered."""
        self._keep_processes()
        async with self._stop:  # two that each hold a process would wait for each other
            for each in [await self._idle.get() for _ in self._processes]:
                await each.stop()
                self._idle.put_nowait(each)

    def _keep_processes(self) -> None:
        """Cancel the end of the idle processes."""
        if self._end is not None:
            self._end.cancel()
