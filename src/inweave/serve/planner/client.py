"""Calls into the process that plans training: how pictures will be cropped, and what a run would need.

It is started by the first call, answers one call at a time, and rests after a while. What it does costs no more than
itself: where it dies, or takes too long, that call fails and the next one gets a new process.
"""

from __future__ import annotations

import asyncio
from typing import Any

from inweave.errors import BusyError, RequestError
from inweave.serve.engine.child_process import ChildProcess
from inweave.serve.engine.wire import Message, WireError
from inweave.serve.jobs.failures import error_of
from inweave.serve.jobs.job import Failure

IDLE_SECONDS = 60.0
MAX_WAITING = 8


class Planner:
    """One process, for all that ask."""

    def __init__(self, seconds: float = 600.0) -> None:
        self._seconds = seconds
        self._process: ChildProcess | None = None
        self._turn = asyncio.Lock()
        self._calls = 0
        self._rest: asyncio.TimerHandle | None = None
        self._resting: asyncio.Task[None] | None = None

    async def call(self, name: str, data: dict[str, Any]) -> dict[str, Any]:
        """The answer to a call of `planner_process`; its errors are raised here."""
        if self._calls >= MAX_WAITING:
            raise BusyError("many training plans are being made; ask again in a moment")
        self._calls += 1
        try:
            async with self._turn:
                answer = await self._ask(Message("call", {"name": name, **data}))
        finally:
            self._calls -= 1
        if answer.type == "error":
            raise error_of(Failure(**answer.data))
        return answer.data

    async def _ask(self, message: Message) -> Message:
        if self._rest is not None:
            self._rest.cancel()
        try:
            if self._process is None or self._process.pid is None:
                self._process = ChildProcess("inweave.serve.planner.process")
                await self._process.start({})
            await self._process.send(message)
            async with asyncio.timeout(self._seconds):
                answer = await self._process.receive()
        except (WireError, TimeoutError, asyncio.CancelledError) as error:
            await asyncio.shield(self._stop(now=True))
            if isinstance(error, asyncio.CancelledError):
                raise
            reason = "took too long" if isinstance(error, TimeoutError) else "ended unexpectedly"
            raise RequestError(
                f"the plan could not be made: its process {reason}; the log of the worker may say why"
            ) from None
        self._rest = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.release)
        return answer

    def release(self) -> None:
        """End the process soon: a run that starts now needs the memory it holds."""
        self._resting = asyncio.ensure_future(self.close())

    async def close(self) -> None:
        """End the process, once it has answered."""
        async with self._turn:
            await self._stop()

    async def _stop(self, *, now: bool = False) -> None:
        process, self._process = self._process, None
        if self._rest is not None:
            self._rest.cancel()
        if process is not None:
            await process.stop(now=now)
