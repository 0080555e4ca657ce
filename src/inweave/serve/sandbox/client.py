"""Calls into sandbox processes, which open untrusted files; a call that kills its process fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inweave.errors import Problem, RequestError
from inweave.serve.engine.child_process import CallProcess
from inweave.serve.engine.wire import WireError

#: for calls that read or write a whole adapter file
FILE_SECONDS = 300.0


class SandboxClient:
    """A few processes; each call waits for an idle one."""

    def __init__(
        self, processes: int = 2, seconds: float = 30.0, folders: Sequence[Path] = (), private: Sequence[str] = ()
    ) -> None:
        self._seconds = seconds
        self._idle: asyncio.LifoQueue[CallProcess] = asyncio.LifoQueue()
        for _ in range(processes):
            settings = {"folders": [str(folder) for folder in folders], "private": [*private]}
            self._idle.put_nowait(CallProcess("inweave.serve.sandbox.process", settings))

    async def image(self, content: bytes, label: str, pixels: int) -> bytes:
        """Return an untrusted image as a clean PNG; raise RequestError if it cannot be read."""
        answer = await self._call("image", label, content=content, label=label, pixels=pixels)
        return bytes(answer["content"])

    async def thumbnail(self, path: str, side: int, label: str) -> bytes:
        """Return a small copy of an image that was checked before, as WebP."""
        return bytes((await self._call("thumbnail", label, path=path, side=side))["content"])

    async def thumbnail_of(self, content: bytes, side: int, label: str) -> bytes:
        """Return a small copy of an untrusted image, as WebP; raise RequestError if it cannot be read."""
        return bytes((await self._call("thumbnail_of", label, content=content, side=side, label=label))["content"])

    async def image_facts(self, content: bytes, label: str) -> dict[str, Any]:
        """Return the `format`, `width`, `height` and `settings` of an untrusted image.

        ``settings``: fields of `ImageSettings`, or None. Raise RequestError if the image cannot be read.
        """
        return await self._call("image_facts", label, content=content, label=label)

    async def record(self, content: bytes) -> dict[str, str]:
        """Return the texts in an image file."""
        return dict((await self._call("record", "image", content=content))["texts"])

    async def settings(self, content: bytes) -> dict[str, Any]:
        """Return the settings that made an image, as fields of `ImageSettings`; raise RequestError if it has none."""
        return dict((await self._call("settings", "image", content=content))["settings"])

    async def adapter(self, path: str, label: str) -> None:
        """Read a file as an adapter; raise FormatError if it is not one, or if its numbers are not finite."""
        await self._call("adapter", label, seconds=FILE_SECONDS, path=path, label=label)

    async def lora(
        self, path: str, base: str, label: str, values: str = "none", *, known: bool = False, placements: bool = False
    ) -> dict[str, Any]:
        """Return the verdict on an adapter file for a base: a path, or with ``known`` the name of a known base."""
        answer = await self._call(
            "lora", label, path=path, base=base, values=values, known=known, placements=placements
        )
        return dict(answer["verdict"])

    async def convert(
        self, path: str, target: str, label: str, *, to: str, base: str | None, drop: bool
    ) -> dict[str, Any]:
        """Write an adapter file in another dialect; a PEFT adapter, which is two files, as a ZIP archive."""
        return await self._call(
            "convert", label, seconds=FILE_SECONDS, path=path, target=target, label=label, to=to, base=base, drop=drop
        )

    async def _call(self, name: str, subject: str, /, *, seconds: float | None = None, **data: Any) -> dict[str, Any]:
        """Return the answer to a call; ``subject`` names the file in the error of a call that killed its process."""
        process = await self._idle.get()
        try:
            return await process.call(name, data, seconds or self._seconds)
        except (WireError, TimeoutError):
            raise RequestError(Problem(subject, "it could not be read safely")) from None
        finally:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        """End the idle processes."""
        while not self._idle.empty():
            await self._idle.get_nowait().stop()
