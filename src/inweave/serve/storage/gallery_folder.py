"""Image files in the folder of the gallery: listed and read without following links, hidden names left out."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from inweave.errors import MissingError
from inweave.files.confinement import open_beneath

#: endings of files that may be images; their contents decide
ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
MAX_FILE = 256 * 1024**2


def image_files(folder: Path) -> Iterator[tuple[str, str, int, float]]:
    """Yield (account, path, size, time of change) of every file below a folder that may be an image."""
    waiting = [("", "")]
    while waiting:
        account, inner = waiting.pop()
        try:
            entries = sorted(os.scandir(folder / inner), key=lambda entry: entry.name)
        except OSError:
            if not inner:
                raise
            continue  # removed meanwhile
        for entry in entries:
            path = f"{inner}/{entry.name}" if inner else entry.name
            if entry.name.startswith(".") or not _is_text(path):
                continue
            if entry.is_dir(follow_symlinks=False):
                owner = entry.name[1:] if not inner and entry.name.startswith("@") else account
                waiting.append((owner, path))
            elif entry.name.lower().endswith(ENDINGS) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield account, path, status.st_size, status.st_mtime


def read_file(folder: Path, path: str) -> bytes:
    """Return the bytes of a file below a folder; raise MissingError if it is gone or is not a regular file."""
    try:
        descriptor = open_beneath(folder, path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        raise MissingError("the file of this image is not in the gallery any more") from None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise MissingError("the file of this image is not a file any more")
        return file.read(MAX_FILE)


def remove_empty(folder: Path) -> None:
    """Remove a folder that holds nothing but folders; raise OSError if it holds a file."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir()
    folder.rmdir()


def _is_text(path: str) -> bool:
    """Return whether a name of the file system is UTF-8, which rows and answers can hold."""
    try:
        return bool(path.encode())
    except UnicodeEncodeError:
        return False
