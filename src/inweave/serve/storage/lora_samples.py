"""Sample images of LoRAs, made on demand: one with the LoRA and one without, of the same prompt and seed.

    <folder>/<key>.json, <key>-with.webp, <key>-without.webp

The key is made of the LoRA's id, size and time of change, so a file that is replaced has no sample. The JSON is written
last, so that a sample is complete or not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inweave.errors import MissingError
from inweave.files.writing import write_atomic
from inweave.library import LibraryEntry
from inweave.serve.jobs.errors import StorageError

#: pixels of the longer side
SIDE = 512
NAMES = ("with", "without")


class LoraSamples:
    """The samples of a worker, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def facts(self, entry: LibraryEntry) -> dict[str, Any] | None:
        """Return how a sample was made: `prompt`, `seed`, `model`, `strength`, `version`; None if there is none."""
        try:
            facts = json.loads((self._folder / f"{_key(entry)}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return facts if isinstance(facts, dict) else None

    def put(self, entry: LibraryEntry, images: Mapping[str, bytes], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Store the images "with" and "without" a LoRA, as WebP; return the facts with their `version`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        version = hashlib.sha256(b"".join(images[name] for name in NAMES)).hexdigest()[:16]
        stored = {**facts, "version": version}
        for name in NAMES:
            write_atomic(self._path(entry, name), [images[name]], error=StorageError)
        document = json.dumps(stored).encode()
        write_atomic(self._folder / f"{_key(entry)}.json", [document], error=StorageError)
        return stored

    def image(self, entry: LibraryEntry, name: str) -> Path:
        """Return the path of an image, "with" or "without"; raise MissingError if there is no sample."""
        path = self._path(entry, name)
        if name not in NAMES or not path.is_file():
            raise MissingError(f"LoRA {entry.name} has no sample image")
        return path

    def remove(self, entry: LibraryEntry) -> None:
        """Remove the sample of a LoRA, if there is one."""
        for path in (self._folder / f"{_key(entry)}.json", *(self._path(entry, name) for name in NAMES)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _path(self, entry: LibraryEntry, name: str) -> Path:
        return self._folder / f"{_key(entry)}-{name}.webp"


def _key(entry: LibraryEntry) -> str:
    return hashlib.sha256(f"{entry.id} {entry.size} {entry.modified!r}".encode()).hexdigest()[:32]
