"""Calls into processes that open what strangers send; a call that kills its process is an error of that call alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inweave.errors import Problem, RequestError
from inweave.serve.engine.child_process import ChildProcess
from inweave.serve.engine.wire import Message, WireError
from inweave.serve.jobs.failures import error_of
from inweave.serve.jobs.job import Failure

#: for calls that read or write a whole adapter file
FILE_SECONDS = 300.0


class Checker:
    """A few processes; each call waits for an idle one."""

    def __init__(self, processes: int = 2, seconds: float = 30.0, folders: Sequence[Path] = ()) -> None:
        self._seconds, self._folders = seconds, [str(folder) for folder in folders]
        self._idle: asyncio.LifoQueue[ChildProcess | None] = asyncio.LifoQueue()
        for _ in range(processes):
            self._idle.put_nowait(None)  # started by the first call that needs it

    async def picture(self, content: bytes, label: str, pixels: int) -> bytes:
        """A picture from outside as a clean PNG; `RequestError` where it is none."""
        answer = await self._call(label, {"name": "picture", "label": label, "pixels": pixels}, content)
        return answer.blobs[0]

    async def thumbnail(self, path: str, side: int, label: str) -> bytes:
        """A small copy of a picture that was checked before, as WebP."""
        return (await self._call(label, {"name": "thumbnail", "path": path, "side": side})).blobs[0]

    async def record(self, content: bytes) -> dict[str, str]:
        """The texts in a picture."""
        texts: dict[str, str] = (await self._call("image", {"name": "record"}, content)).data["texts"]
        return texts

    async def settings(self, content: bytes) -> dict[str, Any]:
        """What made a picture: the fields of `ImageSettings`; `RequestError` where it does not say."""
        settings: dict[str, Any] = (await self._call("picture", {"name": "settings"}, content)).data["settings"]
        return settings

    async def adapter(self, path: str, label: str) -> None:
        """Read a file as an adapter; `FormatError` where it is none, or where its numbers are not finite."""
        await self._call(label, {"name": "adapter", "path": path, "label": label}, seconds=FILE_SECONDS)

    async def lora(
        self, path: str, base: str, label: str, values: str = "none", *, known: bool = False, placements: bool = False
    ) -> dict[str, Any]:
        """The verdict on an adapter file and a base: a path, or with ``known`` the name of a base that inweave knows."""
        call = {"name": "lora", "path": path, "base": base, "values": values, "known": known, "placements": placements}
        verdict: dict[str, Any] = (await self._call(label, call)).data["verdict"]
        return verdict

    async def convert(
        self, path: str, target: str, label: str, *, to: str, base: str | None, drop: bool
    ) -> dict[str, Any]:
        """Write an adapter file anew in another dialect; a PEFT adapter, which is two files, as a ZIP archive."""
        call = {"name": "convert", "path": path, "target": target, "label": label, "to": to, "base": base, "drop": drop}
        return (await self._call(label, call, seconds=FILE_SECONDS)).data

    async def _call(
        self, label: str, data: dict[str, Any], content: bytes | None = None, *, seconds: float | None = None
    ) -> Message:
        process = await self._idle.get()
        try:
            if process is None or process.pid is None:
                process = ChildProcess("inweave.serve.sandbox.process")
                await process.start({"folders": self._folders})
            await process.send(Message("call", data, () if content is None else (content,)))
            async with asyncio.timeout(seconds or self._seconds):
                answer = await process.receive()
        except (WireError, TimeoutError, asyncio.CancelledError) as error:
            if process is not None:
                await asyncio.shield(process.stop(now=True))
            process = None
            if isinstance(error, asyncio.CancelledError):
                raise
            raise RequestError(Problem(label, "it could not be read safely")) from None
        finally:
            self._idle.put_nowait(process)
        if answer.type == "error":
            raise error_of(Failure(**answer.data))
        return answer

    async def close(self) -> None:
        while not self._idle.empty():
            process = self._idle.get_nowait()
            if process is not None:
                await process.stop()
