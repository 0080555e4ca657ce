"""Reading: a regular file or an error, at once.

    with open_regular(path) as file: ...      never blocks: a named pipe, a device, a socket and a folder are refused
    read_bytes(path, limit), read_text(path, limit)
    read_foreign_text(path, limit)            text that other programs wrote, in whatever encoding they use

What lies at the path is looked at before it is opened (opening a device can do something) and again when it is open
(another may have taken its place); a pipe that takes the place in between is opened without waiting for a writer. Below
folders of `inweave.files.confinement` no link is followed to anywhere else.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from inweave.errors import FormatError
from inweave.files.confinement import open_confined
from inweave.files.paths import ErrorClass, as_path, kind, mode_of, printable_path, reason

MAX_TEXT = 64 * 1024 * 1024
_BLOCK = 1 << 16
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
          (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]")
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)


@contextmanager
def open_regular(
    path: str | os.PathLike[str], *, error: ErrorClass = FormatError, limit: int | None = None, buffering: int = -1
) -> Iterator[BinaryIO]:
    """Open a regular file for reading; ``limit``: bytes. Whatever the system refuses, also later, raises an
    ``error``.
    """
    source = as_path(path)
    file = open_binary(source, error=error, limit=limit, buffering=buffering)
    try:
        with file:
            yield file
    except OSError as problem:
        if isinstance(problem, BrokenPipeError):  # of our output, never of a file
            raise
        raise error(reason(source, problem)) from None


def open_binary(
    path: Path, *, error: ErrorClass = FormatError, limit: int | None = None, buffering: int = -1
) -> BinaryIO:
    """Open a regular file like `open_regular`, for callers that close it themselves."""
    ensure_regular(path, error)
    try:
        descriptor = open_confined(path, _FLAGS)
    except (OSError, ValueError) as problem:
        raise error(reason(path, problem)) from None
    try:
        status = os.fstat(descriptor)
        _check_mode(path, status.st_mode, error)
        if limit is not None and status.st_size > limit:
            raise error(f"{printable_path(path)}: {status.st_size:,} bytes, more than the {limit:,} that are accepted")
        # by its path, which errors of later reads name
        return open(path, "rb", buffering, opener=lambda *_: descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | os.PathLike[str], limit: int, *, error: ErrorClass = FormatError) -> bytes:
    """Return the contents of a file of at most ``limit`` bytes."""
    with open_regular(path, error=error, limit=limit) as file:
        size = min(os.fstat(file.fileno()).st_size, limit) + 1
        raw = file.read(size) or b""  # allocated at once
        while size <= len(raw) <= limit and (more := file.read(_BLOCK)):  # fewer bytes: its end
            raw += more
    if len(raw) > limit:  # it grew, or its size is unknown, as in /proc
        raise error(f"{printable_path(path)}: more than the {limit:,} bytes that are accepted")
    return raw


def read_text(
    path: str | os.PathLike[str], limit: int = MAX_TEXT, *, error: ErrorClass = FormatError, newlines: bool = True
) -> str:
    """Return the text of a file of at most ``limit`` bytes: UTF-8, with or without a byte-order mark.

    ``newlines``: those of other systems become "\\n".
    """
    raw = read_bytes(path, limit, error=error)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{printable_path(path)}: is not text: byte {problem.start} is not UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if newlines else text


def read_foreign_text(
    path: str | os.PathLike[str], limit: int = MAX_TEXT, *, error: ErrorClass = FormatError
) -> tuple[str, str]:
    """Return (text, encoding) of a file that another program wrote.

    UTF-8; UTF-16 and UTF-32 by their mark; UTF-16 without one, by its zeros; else Windows-1252, which includes Latin-1.
    Contents with control characters are not text.
    """
    raw = read_bytes(path, limit, error=error)
    for encoding in _encodings(raw):
        try:
            text = raw.decode(encoding).removeprefix("\ufeff")
        except UnicodeDecodeError:
            continue
        if encoding == "utf-8" or not _CONTROL.search(text):
            return text.replace("\r\n", "\n").replace("\r", "\n"), encoding
    raise error(f"{printable_path(path)}: is not text in UTF-8, UTF-16 or Latin-1; save it as UTF-8")


def _encodings(raw: bytes) -> tuple[str, ...]:
    for mark, encoding in _MARKS:
        if raw.startswith(mark):
            return (encoding,)
    for start, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):  # letters of Western languages have a zero byte
        zeros, others = raw[start::2].count(0), raw[1 - start :: 2].count(0)
        if zeros and not others and len(raw) % 2 == 0 and 8 * zeros >= 3 * len(raw):
            return (encoding, "utf-8")
    return ("utf-8", "windows-1252", "latin-1")


def ensure_regular(path: Path, error: ErrorClass = FormatError) -> None:
    """Raise unless a regular file lies there; for what a library opens by name."""
    _check_mode(path, mode_of(path, error), error)


def _check_mode(path: Path, mode: int, error: ErrorClass) -> None:
    if not stat.S_ISREG(mode):
        raise error(f"{printable_path(path)}: not a regular file ({kind(mode)})")
