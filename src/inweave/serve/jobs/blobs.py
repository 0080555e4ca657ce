"""Images of jobs and uploads as named bytes: in a folder, or in an S3-compatible store (`jobs.s3`).

write, read      whole contents under a name such as job-1/0.png
sizes, ages      what is below a name; the names at the top, with the seconds since they changed
remove           a name, and everything below it
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Protocol

from inweave.files.paths import printable_path
from inweave.files.writing import write_atomic
from inweave.serve.jobs.errors import StorageError


class BlobStore(Protocol):
    """Named bytes; safe to call from several threads. A store that cannot be reached raises `StoreLost`."""

    @property
    def label(self) -> str:
        """Where it is, for people."""

    def part(self, name: str) -> BlobStore:
        """Return the part of the store whose names begin with ``name`` and a slash."""

    def write(self, name: str, content: bytes) -> None:
        """Write whole contents, or none; raise StorageError if the store has no room or refuses."""

    def read(self, name: str) -> bytes | None:
        """Return the contents of a name; None if there are none."""

    def path(self, name: str) -> Path | None:
        """Return the file that holds a name; None if there is none, or this machine has no such file."""

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size in bytes of everything directly below a name, without the name."""

    def ages(self) -> dict[str, float]:
        """Return the names at the top, with the seconds since they changed."""

    def remove(self, name: str) -> None:
        """Remove a name and everything below it; what cannot be removed now stays until the next cleanup."""


class FolderBlobs:
    """Files in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def label(self) -> str:
        return printable_path(self.root)

    def part(self, name: str) -> FolderBlobs:
        return FolderBlobs(self.root / name)

    def write(self, name: str, content: bytes) -> None:
        path = self.root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{printable_path(path)}: {error.strerror}") from None
        write_atomic(path, [content], error=StorageError)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def path(self, name: str) -> Path | None:
        path = self.root / name
        return path if path.is_file() else None

    def sizes(self, name: str) -> dict[str, int]:
        folder = self.root / name
        return {each.name: each.stat().st_size for each in sorted(folder.glob("*")) if each.is_file()}

    def ages(self) -> dict[str, float]:
        ages = {}
        if self.root.is_dir():
            for each in self.root.iterdir():
                with contextlib.suppress(FileNotFoundError):  # another process removes the same
                    ages[each.name] = time.time() - each.stat().st_mtime
        return ages

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
