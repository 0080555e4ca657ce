"""The host of one runner: a Ray actor with a device, whose child is the model process.

    begin()                      start the model process; return facts about the machine
    exchange(turn, after)        the reports after number ``after``, as soon as there are some, at the latest after
                                 ``HOLD`` seconds; ``turn``: the last answer of `exchange` that the dispatcher has
    command(number, ...)         pass a command on, once; return the files that are missing here
    receive(...), complete(...)  a file that was missing
    end(now)                     end the model process

Every answer of `exchange` has a number. One that the dispatcher confirms with its next call extends the lease by
``LEASE`` seconds from when that answer was given. The dispatcher counts from when it got the answer, so it never gives
a job to another runner before this one has ended. The model process knows the lease too, so that it ends even if this
process is stopped. The actor ends with its lease, which makes its device free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from inweave.errors import InweaveError
from inweave.serve.cluster.files import Key, NodeFiles
from inweave.serve.engine.child_process import ChildProcess
from inweave.serve.engine.contract import (
    LEASE,
    Command,
    Finished,
    Lease,
    Load,
    Residency,
    RunnerSettings,
    RunRequest,
    decode,
    encode,
)
from inweave.serve.engine.model_process import LEASE_OVER
from inweave.serve.engine.wire import Message, WireError
from inweave.serve.jobs.errors import StorageError
from inweave.serve.jobs.failures import failure_of
from inweave.version import __version__

HOLD = 1.0
GATHER = 0.05  # seconds that an event of a job may wait for others
MAX_REPORTS = 256  # of one answer
WATCH_SECONDS = 0.2
#: until a runner ends that nobody has begun; a busy machine may take longer than a lease for it
UNCLAIMED_SECONDS = 30.0


class RunnerHost:
    """The actor; every method runs in its event loop."""

    def __init__(self, settings: dict[str, Any], cache: str, cache_bytes: int, witness: str) -> None:
        """Prepare a runner; a machine that sees the file ``witness`` shares the folder of training."""
        self._files = NodeFiles(Path(cache).expanduser(), cache_bytes)
        runner = decode(Message("settings", settings))
        assert isinstance(runner, RunnerSettings)
        self._settings = replace(runner, private=(*runner.private, str(self._files.cache)))
        self._witness = Path(witness)
        self._process = ChildProcess("inweave.serve.engine.model_process")
        self._reports: list[tuple[int, bytes]] = []
        self._changed = asyncio.Event()
        self._commands: set[int] = set()
        self._passing = asyncio.Lock()
        self._local: dict[str, str] = {}  # path here -> path of the dispatcher
        self._answers: dict[int, float] = {}  # number -> when it was given
        self._until = 0.0
        self._ended: int | None = None  # exit code of the model process
        self._tasks: list[asyncio.Task[None]] = []
        # its bridge may have ended while it waited for a device; then nobody knows of it
        self._unclaimed = threading.Timer(UNCLAIMED_SECONDS, os._exit, (0,))
        self._unclaimed.daemon = True
        self._unclaimed.start()

    async def begin(self) -> dict[str, Any]:
        """Start the model process."""
        self._unclaimed.cancel()
        self._answers = {0: time.monotonic()}
        self._until = self._answers[0] + LEASE
        await self._process.start(encode(self._settings))
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        import ray  # not above: the web process knows the module too

        context = ray.get_runtime_context()
        return {
            "version": __version__, "host": socket.gethostname(), "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(), "shares": await asyncio.to_thread(self._witness.is_file),
        }  # fmt: skip

    async def exchange(self, turn: int, after: int) -> dict[str, Any]:
        """Return {answer, reports, ended}; see the module."""
        self._until = max(self._until, self._answers.get(turn, 0.0) + LEASE)
        self._answers = {number: at for number, at in self._answers.items() if number >= turn}
        if self._ended is None:
            await self._send(Lease(self._until))
        self._reports = [each for each in self._reports if each[0] > after]
        if self._ended is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HOLD):
                    await self._changed.wait()
        if len(self._reports) <= MAX_REPORTS:
            self._changed.clear()
        answer = max(self._answers, default=turn) + 1
        self._answers[answer] = time.monotonic()
        return {"answer": answer, "reports": self._reports[:MAX_REPORTS], "ended": self._ended}

    async def command(self, number: int, message: dict[str, Any], keys: dict[str, Key]) -> list[str]:
        """Pass a command on, unless it came before; return the paths of ``keys`` that this machine does not have."""
        async with self._passing:  # a call that is repeated comes while the first one still looks for files
            return await self._command(number, decode(Message(**message)), keys)

    async def _command(self, number: int, command: Any, keys: dict[str, Key]) -> list[str]:
        if number in self._commands:
            return []
        if isinstance(command, RunRequest | Load):
            self._files.release()
            here = {path: await asyncio.to_thread(self._files.find, key) for path, key in keys.items()}
            if missing := [path for path, local in here.items() if local is None]:
                return missing
            self._local |= {local: path for path, local in here.items() if local is not None}
            command = _with_paths(command, {path: str(local) for path, local in here.items()})
        self._commands.add(number)
        assert isinstance(command, Command)
        await self._send(command)
        return []

    async def receive(self, part: str, name: str, offset: int, content: bytes) -> dict[str, Any]:
        """Write a piece of a file that was missing; return {} or the {failure}."""
        return await self._copying(part, self._files.write, part, name, offset, content)

    async def open_copy(self, key: Key) -> dict[str, Any]:
        """Make room for a copy; return {part}, or the {failure}."""
        name = ""

        def begin() -> None:
            nonlocal name
            name = self._files.begin(key)

        return await self._copying("", begin) or {"part": name}

    async def close_copy(self, part: str, key: Key) -> dict[str, Any]:
        """Check a copy that is whole; return {} or the {failure}."""
        return await self._copying(part, self._files.complete, part, key)

    async def _copying(self, part: str, work: Callable[..., None], *values: Any) -> dict[str, Any]:
        """Do a part of a copy; return {} or the {failure}: a full disk is not the end of this runner."""
        try:
            await asyncio.to_thread(work, *values)
        except (InweaveError, OSError) as error:
            if part:
                await asyncio.to_thread(self._files.abandon, part)
            if isinstance(error, OSError):
                error = StorageError(f"{socket.gethostname()} cannot store a copy of a file: {error.strerror}")
            return {"failure": asdict(failure_of(error))}
        return {}

    async def end(self, now: bool) -> int | None:
        """End the model process; return its exit code."""
        return await self._process.stop(now=now) if self._ended is None else self._ended

    async def _send(self, command: Command) -> None:
        with contextlib.suppress(WireError):  # `_read` notices it too, and reports it
            await self._process.send(encode(command))

    async def _read(self) -> None:
        number = 0
        while True:
            try:
                message = await self._process.receive()
            except WireError:
                break
            if message.type == "finished":
                message = encode(self._with_original_paths(decode(message)))  # type: ignore[arg-type]
                self._files.release()
            number += 1
            self._reports.append((number, message.encode()))
            if message.type == "event":  # of quick steps several go together: each answer takes time from the job
                asyncio.get_running_loop().call_later(GATHER, self._changed.set)
            else:
                self._changed.set()
        self._ended = await self._process.stop(now=True) or 0
        self._changed.set()

    async def _watch(self) -> None:
        """End everything with the lease."""
        while time.monotonic() < self._until and self._ended != LEASE_OVER:
            await asyncio.sleep(WATCH_SECONDS)
        await self._process.stop(now=True)
        os._exit(0)

    def _with_original_paths(self, report: Finished) -> Finished:
        residency = report.residency
        return replace(
            report, residency=Residency(
                tuple(self._local.get(each, each) for each in residency.models),
                tuple(self._local.get(each, each) for each in residency.adapters),
            ),
        )  # fmt: skip


def _with_paths(command: RunRequest | Load, here: dict[str, str]) -> RunRequest | Load:
    """Return a command with the paths of this machine."""
    model = here.get(command.model, command.model)
    if isinstance(command, Load):
        return replace(command, model=model)
    loras, upscalers, models = (
        {label: here.get(path, path) for label, path in table.items()}
        for table in (command.loras, command.upscalers, command.models)
    )
    return replace(command, model=model, loras=loras, upscalers=upscalers, models=models)
