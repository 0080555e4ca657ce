"""Calls into the process that plans training: how images will be cropped, and how much memory and time a run needs.

The process is started by the first call, answers one call at a time, and ends after a while without calls. If it dies
or takes too long, only that call fails, and the next one gets a new process.
"""

from __future__ import annotations

import asyncio
from typing import Any

from inweave.errors import BusyError, RequestError
from inweave.serve.engine.child_process import CallProcess
from inweave.serve.engine.wire import WireError

IDLE_SECONDS = 60.0
MAX_WAITING = 8


class PlannerClient:
    """One process for all callers."""

    def __init__(self, seconds: float = 600.0) -> None:
        self._seconds = seconds
        self._process = CallProcess("inweave.serve.planner.process")
        self._turn = asyncio.Lock()
        self._calls = 0
        self._idle: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    async def call(self, name: str, data: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a call of `planner.process`, and raise the error it reports."""
        if self._calls >= MAX_WAITING:
            raise BusyError("many training plans are being made; ask again in a moment")
        self._calls += 1
        try:
            async with self._turn:
                return await self._ask(name, data)
        finally:
            self._calls -= 1

    async def _ask(self, name: str, data: dict[str, Any]) -> dict[str, Any]:
        self._keep_process()
        try:
            return await self._process.call(name, data, self._seconds)
        except (WireError, TimeoutError) as error:
            reason = "took too long" if isinstance(error, TimeoutError) else "ended unexpectedly"
            raise RequestError(
                f"the plan could not be made: its process {reason}; the log of the worker may say why"
            ) from None
        finally:
            self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.release)

    def release(self) -> None:
        """End the process soon: a run that starts now needs the memory it holds."""
        self._closing = asyncio.ensure_future(self.close())

    async def close(self) -> None:
        """End the process, once it has answered."""
        async with self._turn:
            self._keep_process()
            await self._process.stop()

    def _keep_process(self) -> None:
        """Cancel the end of the idle process."""
        if self._idle is not None:
            self._idle.cancel()
