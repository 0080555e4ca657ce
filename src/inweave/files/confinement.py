"""Confined folders: no path leads out of them, even if a file is swapped for a link after it was checked.

    with confined(folder): ...          files below the folder are opened step by step, without following a link
    open_beneath(folder, "a/b.bin")     a descriptor of that file

A link that stays inside is followed, by the name it resolves to; if a part of that path is swapped for a link in the
meantime, opening it fails. The folder itself may be reached through links: its owner put them there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_confined: list[str] = []  # by every thread of the process: nothing needs less care than others


@contextmanager
def confined(*folders: Path) -> Iterator[None]:
    """Meanwhile, `inweave.files.reading` opens nothing below these folders that lies elsewhere."""
    names = confine(*folders)
    try:
        yield
    finally:
        for name in names:
            _confined.remove(name)


def confine(*folders: Path) -> list[str]:
    """Confine the rest of the process to these folders."""
    names = [str(folder.resolve()) for folder in folders]
    _confined.extend(names)
    return names


def open_confined(path: Path, flags: int) -> int:
    """Return a descriptor of a file without leaving its confined folder; a file outside of all is opened plainly."""
    whole = os.path.normpath(path.absolute())
    for folder in _confined:
        if whole.startswith(folder + os.sep):
            return open_beneath(Path(folder), whole[len(folder) + 1 :], flags)
    return os.open(path, flags)


def open_beneath(folder: Path, path: str, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of ``path`` below ``folder``; raise OSError (ELOOP) if it leads out of the folder."""
    target, boundary = (folder / path).resolve(), folder.resolve()
    if not target.is_relative_to(boundary):
        raise OSError(errno.ELOOP, "a link that leads out of the library", str(folder / path))
    parts = target.relative_to(boundary).parts
    if not parts:
        return os.open(folder, flags)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number, part in enumerate(parts):
            kind = flags if number == len(parts) - 1 else os.O_RDONLY | os.O_DIRECTORY
            inner = _open_in(descriptor, part, kind | os.O_NOFOLLOW)
            os.close(descriptor)
            descriptor = inner
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def descriptor_path(descriptor: int) -> str:
    """Return a path that opens what a descriptor has open."""
    return f"{_DESCRIPTORS}/{descriptor}"


_HAS_PROC = Path("/proc/self/fd").is_dir()
_DESCRIPTORS = "/proc/self/fd" if _HAS_PROC else "/dev/fd"


def _open_in(folder: int, name: str, flags: int) -> int:
    """Open a name in an open folder; by its whole path where there is one, so that traces of a process show it."""
    if _HAS_PROC:
        return os.open(f"{descriptor_path(folder)}/{name}", flags)
    return os.open(name, flags, dir_fd=folder)
