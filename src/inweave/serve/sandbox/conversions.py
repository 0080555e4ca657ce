"""LoRAs converted to other dialects, kept long enough to be downloaded.

data/converted/ID/adapter.safetensors     or adapter.zip: a PEFT adapter is two files
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inweave.errors import MissingError
from inweave.library import LibraryEntry
from inweave.serve.sandbox.client import SandboxClient

KEEP_SECONDS = 3600.0
MAX_KEPT = 8


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted file, and the name that browsers save it under."""

    path: Path
    name: str
    created: float


class ConversionStore:
    """The files that were converted since the worker started; the oldest make room for new ones."""

    def __init__(self, folder: Path, sandbox: SandboxClient) -> None:
        self._folder, self._sandbox = folder, sandbox
        self._files: dict[str, Converted] = {}

    async def create(self, entry: LibraryEntry, *, to: str, base: str | None, drop: bool) -> dict[str, Any]:
        """Convert a file in the sandbox; return its report and the URL to download the result from."""
        identifier = secrets.token_hex(16)
        target = self._folder / identifier
        await asyncio.to_thread(target.mkdir, parents=True)
        try:
            report = await self._sandbox.convert(
                str(entry.file), str(target), f"LoRA {entry.name}", to=to, base=base, drop=drop
            )
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)
            raise
        path = target / report["file"]
        name = f"{entry.name}-{to}{path.suffix}"
        self._files[identifier] = Converted(path, name, time.monotonic())
        await asyncio.to_thread(self.expire)
        return {**report, "id": identifier, "file": name, "url": f"/v1/conversions/{identifier}"}

    def file(self, identifier: str) -> tuple[Path, str]:
        """Return (the path of a converted file, the name that browsers save it under)."""
        converted = self._files.get(identifier)
        if converted is None or not converted.path.is_file():
            raise MissingError("this conversion has expired; convert the LoRA again")
        return converted.path, converted.name

    def expire(self) -> None:
        """Remove files that exceed the limits of age and number."""
        oldest = time.monotonic() - KEEP_SECONDS
        by_age = sorted(self._files.items(), key=lambda each: each[1].created, reverse=True)
        for place, (identifier, converted) in enumerate(by_age):
            if place >= MAX_KEPT or converted.created < oldest:
                del self._files[identifier]
                shutil.rmtree(converted.path.parent, ignore_errors=True)

    def clear(self) -> None:
        """Remove all files, also those of earlier processes."""
        self._files.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
