"""Writing: a file or a folder appears whole, under its name, or not at all.

    write_atomic(path, chunks)        .NAME.RANDOM.part next to it -> flushed to disk -> renamed -> folder flushed
    with new_folder(path) as hidden:  .NAME.RANDOM.part next to it; renamed by the caller, removed otherwise
    open_append(path)                 a log or a lock: grows in place
    try_to_write(path)                fails as writing would, before there is anything to write

A temporary name is random and must be new (O_EXCL), so that no link can be planted there. A link at the target is
replaced, never followed; anything else than a file or a link at the target stays. The mode is what the umask leaves
of 0666; a file that is replaced keeps its mode. A refusal of the system (a full disk, a read-only folder) becomes a
one-line error, and nothing is left behind.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from inweave.errors import FormatError
from inweave.files.paths import ErrorClass, as_path, exists, is_folder, kind, printable_path, reason

Chunk = bytes | bytearray | memoryview
_MAX_NAME = 255  # bytes, in every common file system
_NEW = os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_GROWING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def write_atomic(
    path: str | os.PathLike[str], chunks: Iterable[Chunk], *, error: ErrorClass = FormatError, durable: bool = True
) -> Path:
    """Write a file in one step: a reader sees the old file or the whole new one.

    ``durable``: it survives a power failure; False for what can be computed again and is checked when it is read.
    """
    target = as_path(path)
    mode = _replaceable(target, error)
    temporary, descriptor = _new_file(target, error)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for chunk in chunks:  # what making a chunk raises is not about this file
                with _system_errors(target, error):
                    file.write(chunk)
            with _system_errors(target, error):
                file.flush()
                if mode is not None and hasattr(os, "fchmod"):
                    os.fchmod(file.fileno(), mode)
                if durable:
                    os.fsync(file.fileno())
        with _system_errors(target, error):
            temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        flush_folder(target.parent)
    return target


def write_text(path: str | os.PathLike[str], text: str, *, error: ErrorClass = FormatError) -> Path:
    """Write a text as UTF-8 in one step."""
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError:
        raise error(f"{printable_path(path)}: cannot be written: the text holds half of a surrogate pair") from None
    return write_atomic(path, [raw], error=error)


def try_to_write(path: str | os.PathLike[str], *, error: ErrorClass = FormatError) -> None:
    """Raise the error that writing a file would end with: an empty one is made and removed, but no folder.

    Permissions alone do not tell: root may write anywhere, and not to /proc or a read-only disk.
    """
    target = as_path(path)
    place, missing = target.absolute(), []
    while not exists(place.parent) and place.parent != place.parent.parent:
        missing.append(place)  # the file, then folders that will be made
        place = place.parent
    if not is_folder(place.parent):
        raise error(f"{printable_path(target)}: cannot be written: {printable_path(place.parent)} is not a folder")
    _replaceable(target, error)
    for each in missing:
        _hidden(each, error)
    with _system_errors(target, error):
        temporary = _hidden(place, error)
        os.close(os.open(temporary, os.O_WRONLY | _NEW, 0o666))
        temporary.unlink(missing_ok=True)


def make_folder(path: str | os.PathLike[str], *, error: ErrorClass = FormatError) -> Path:
    """Return the folder of this name, created with its parents if it does not exist."""
    folder = as_path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as problem:
        raise error(
            f"{printable_path(problem.filename or folder)}: cannot be made a directory: something else has its name"
        ) from None
    except (OSError, ValueError) as problem:
        raise error(f"{reason(folder, problem)}; the folder cannot be made") from None
    except RecursionError:
        raise error(f"{printable_path(folder)}: too many folders inside each other; they cannot be made") from None
    return folder


@contextmanager
def new_folder(target: Path, *, error: ErrorClass = FormatError) -> Iterator[Path]:
    """Create an empty hidden folder next to a path, removed at the end unless it was renamed by then."""
    hidden = _hidden(target, error)
    with _system_errors(target, error):
        hidden.mkdir()
    try:
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder that is seen whole or not at all, whenever the process ends: it loses its name first."""
    hidden = folder.rename(_hidden(folder, FormatError))
    shutil.rmtree(hidden, ignore_errors=True)


def open_append(path: Path, *, error: ErrorClass = FormatError) -> TextIO:
    """Open a text file that grows in place; a link, a pipe or a device is refused."""
    with _system_errors(path, error):
        descriptor = os.open(path, _GROWING, 0o666)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise error(f"{printable_path(path)}: cannot be written: it is {kind(mode)}")
        return os.fdopen(descriptor, "a", encoding="utf-8")
    except BaseException:
        os.close(descriptor)
        raise


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replaceable(target: Path, error: ErrorClass) -> int | None:
    """Return the permissions of the file that will be replaced; raise if it must not be replaced."""
    if not target.name:
        raise error(f"{printable_path(target)}: not the name of a file")
    try:
        mode = target.lstat().st_mode
    except (OSError, ValueError) as problem:
        if isinstance(problem, FileNotFoundError):
            return None
        raise error(f"{reason(target, problem)}; it cannot be written") from None
    if stat.S_ISREG(mode):
        return stat.S_IMODE(mode) & 0o777
    if stat.S_ISLNK(mode):
        return None
    raise error(f"{printable_path(target)}: cannot be written: it is {kind(mode)}")


def _new_file(target: Path, error: ErrorClass) -> tuple[Path, int]:
    temporary = _hidden(target, error)
    with _system_errors(target, error):
        return temporary, os.open(temporary, os.O_WRONLY | _NEW, 0o666)


def _hidden(target: Path, error: ErrorClass) -> Path:
    """Return a name next to the target that cannot be guessed and is within the length limit."""
    name = target.name.encode("utf-8", "surrogateescape") if _is_name(target) else b""
    ending = f".{secrets.token_hex(8)}.part"
    room = _MAX_NAME - 1 - len(ending)
    if not name or len(name) > _MAX_NAME:
        fault = "File name too long" if name else "no file can have this name"
        raise error(f"{printable_path(target)}: cannot be written: {fault}")
    return target.with_name(
        "." + name[:room].decode("utf-8", "ignore" if len(name) > room else "surrogateescape") + ending
    )


def _is_name(target: Path) -> bool:
    try:
        os.fsencode(target.name)
    except UnicodeEncodeError:
        return False
    return bool(target.name) and "\0" not in str(target)


@contextmanager
def _system_errors(target: Path, error: ErrorClass) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            raise error(f"{printable_path(target)}: cannot be written: it is a symbolic link") from None
        raise error(f"{printable_path(target)}: cannot be written: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise error(f"{reason(target, problem)}; it cannot be written") from None
