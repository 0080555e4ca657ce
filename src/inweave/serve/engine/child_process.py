"""Child processes of the web process: started, spoken to, watched, stopped.

The model process sends reports whenever something happens (`ProcessEndpoint`). The sandbox and the planner answer one
call at a time (`CallProcess`); `inweave.serve.engine.rpc_loop` is their side of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Any

from inweave.serve.engine.contract import Command, Report, RunnerSettings, decode, encode
from inweave.serve.engine.wire import Message, WireError, receive_message
from inweave.serve.jobs.failures import error_of
from inweave.serve.jobs.job import Failure

#: variables of the web process alone: the others open files of strangers
SECRETS = (
    "INWEAVE_STORE", "INWEAVE_TOKEN", "PGPASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
)  # fmt: skip
#: seconds a process gets to end by itself
GRACE = 5.0


class ChildProcess:
    """One child process and the pipes to it."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: asyncio.subprocess.Process | None = None
        self._write = asyncio.Lock()

    @property
    def alive(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self, settings: Message) -> None:
        """Start the process in its own session, without the current folder on its import path."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", self._module,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in SECRETS} | {"PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        await self.send(settings)

    async def send(self, message: Message) -> None:
        """Send a message; raise WireError if the process is gone."""
        if self._process is None or self._process.stdin is None:
            raise WireError("the process is not running")
        async with self._write:
            try:
                self._process.stdin.write(message.encode())
                await self._process.stdin.drain()
            except (ConnectionError, RuntimeError):
                raise WireError("the process is gone") from None

    async def receive(self) -> Message:
        """Return the next message; raise WireError if the process is gone."""
        if self._process is None or self._process.stdout is None:
            raise WireError("the process is not running")
        return await receive_message(self._process.stdout)

    async def stop(self, *, now: bool = False, seconds: float = GRACE) -> int | None:
        """End the process, by closing its input ``seconds`` before unless ``now``; return its exit code."""
        process = self._process
        if process is None:
            return None
        if not now and process.returncode is None:
            with contextlib.suppress(OSError, RuntimeError):
                assert process.stdin is not None
                process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        code = await process.wait()
        self._process = None
        return code


class ProcessEndpoint:
    """A `RunnerEndpoint` whose runner is a child process of this one."""

    node = ""

    def __init__(self) -> None:
        self._process = ChildProcess("inweave.serve.engine.model_process")

    @property
    def alive(self) -> bool:
        return self._process.alive

    async def start(self, settings: RunnerSettings) -> None:
        await self._process.start(encode(settings))

    async def send(self, command: Command) -> None:
        await self._process.send(encode(command))

    async def receive(self) -> Report:
        report = decode(await self._process.receive())
        if not isinstance(report, Report):
            raise WireError(f"a runner does not send {type(report).__name__}")
        return report

    async def stop(self, *, now: bool = False) -> int | None:
        return await self._process.stop(now=now)


class CallProcess(ChildProcess):
    """A process that answers calls, one at a time; a call starts it if it does not run."""

    def __init__(self, module: str, settings: dict[str, Any] | None = None) -> None:
        super().__init__(module)
        self._settings = Message("settings", settings or {})

    async def call(self, name: str, data: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a call, and raise the error that the process reports.

        Raises:
            WireError: the process died.
            TimeoutError: there was no answer within ``seconds``, and the process was killed.
        """
        try:
            if not self.alive:
                await self.start(self._settings)
            await self.send(Message(name, data))
            async with asyncio.timeout(seconds):
                answer = await self.receive()
        except (WireError, TimeoutError, asyncio.CancelledError):
            await asyncio.shield(self.stop(now=True))
            raise
        if answer.type == "error":
            raise error_of(Failure(**answer.data))
        return answer.data


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Terminate a process that still runs, and kill it if it does not react."""
    for signal_it in (process.terminate, process.kill):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal_it()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await process.wait()
