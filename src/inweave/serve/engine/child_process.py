"""A child process as the web process sees it: started, spoken to, watched, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Any

from inweave.serve.engine.wire import Message, WireError, parse_header, parse_length

#: seconds a process gets to end by itself
GRACE = 5.0


class ChildProcess:
    """One child process and the pipes to it."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: asyncio.subprocess.Process | None = None
        self._write = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self, settings: dict[str, Any]) -> None:
        """Start it, without the current folder on its import path, in a session of its own."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", self._module,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        await self.send(Message("settings", settings))

    async def send(self, message: Message) -> None:
        """Send a message; `WireError` where the process is gone."""
        if self._process is None or self._process.stdin is None:
            raise WireError("the process is not running")
        async with self._write:
            try:
                self._process.stdin.write(message.encode())
                await self._process.stdin.drain()
            except (ConnectionError, RuntimeError):
                raise WireError("the process is gone") from None

    async def receive(self) -> Message:
        """The next message; `WireError` where the process is gone."""
        if self._process is None or self._process.stdout is None:
            raise WireError("the process is not running")
        try:
            read = self._process.stdout.readexactly
            kind, data, lengths = parse_header(await read(parse_length(await read(4))))
            return Message(kind, data, tuple([await read(length) for length in lengths]))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WireError("the process is gone") from None

    async def stop(self, *, now: bool = False) -> int | None:
        """End it, by closing its input first unless ``now``; returns its exit code."""
        process = self._process
        if process is None:
            return None
        if not now and process.returncode is None:
            with contextlib.suppress(OSError, RuntimeError):
                assert process.stdin is not None
                process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE):
                    await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        code = await process.wait()
        self._process = None
        return code


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Ask a process that still runs to end, and kill it where it does not."""
    for signal_it in (process.terminate, process.kill):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal_it()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await process.wait()
