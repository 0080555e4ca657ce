"""Paths: made from arguments, tested for existence, and printed safely.

    as_path("~/loras/a.safetensors")   a Path; an InweaveError if it cannot be one
    is_file, is_folder, exists         False for names the system cannot look up: 300 characters, a NUL

    printable("a\\x1b[2J\\u202e")        'a\\\\x1b[2J\\\\u202e': escaped as Python writes it

A name in a file can hold escape sequences of terminals, characters that turn the direction of the text around them,
and halves of surrogate pairs. `printable` escapes whatever Unicode calls control, format, surrogate, private use,
separator (but for the space) or unassigned, and letters and marks that show nothing (fillers, most variation
selectors), so that nothing is hidden or disguised.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from inweave.errors import ConfigError, FormatError, InweaveError

ErrorClass = Callable[[str], InweaveError]
_MAX_SHOWN = 300


def as_path(path: object) -> Path:
    """Return a path from a caller's argument."""
    if isinstance(path, Path):
        return path
    if isinstance(path, str | os.PathLike):
        text = os.fspath(path)
        if isinstance(text, str):
            return Path(text)
    raise ConfigError(f"expected a path, got {type(path).__name__}")


def expand_home(path: str | os.PathLike[str], error: ErrorClass = ConfigError) -> Path:
    """Return the path with a leading `~` or `~user` replaced by that home folder."""
    source = as_path(path)
    try:
        return source.expanduser()
    except (RuntimeError, OSError, ValueError, KeyError):
        home = source.parts[0]
        raise error(
            f"{printable_path(source)}: {printable(home)} is not a user's home folder; write the whole path, "
            f"or ./{printable(home)} for a folder of that name"
        ) from None


def mode_of(path: Path, error: ErrorClass = FormatError) -> int:
    """Return the mode of a path, links followed; raise an error with the reason if there is nothing."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError) as problem:
        raise error(reason(path, problem)) from None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a regular file, links followed."""
    try:
        return stat.S_ISREG((path if isinstance(path, Path) else Path(path)).stat().st_mode)
    except (OSError, ValueError):
        return False


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether a path exists, links followed."""
    try:
        Path(path).stat()
    except (OSError, ValueError):
        return False
    return True


def occupied(path: str | os.PathLike[str]) -> bool:
    """Return whether a name is in use, even by a broken link: opening it tells the reason."""
    try:
        Path(path).lstat()
    except (OSError, ValueError):
        return False
    return True


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder, links followed."""
    try:
        return stat.S_ISDIR(Path(path).stat().st_mode)
    except (OSError, ValueError):
        return False


def kind(mode: int) -> str:
    """Return the kind of file that a mode describes, in words."""
    kinds = (
        (stat.S_ISREG, "a file"), (stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"), (stat.S_ISLNK, "a symbolic link"),
    )  # fmt: skip
    return next((name for test, name in kinds if test(mode)), "a device")


def reason(path: Path, problem: OSError | ValueError) -> str:
    """Return one line: the path, and the system's reason."""
    if isinstance(problem, UnicodeEncodeError):
        return f"{printable_path(path)}: no file can have this name: it holds half of a surrogate pair"
    if isinstance(problem, ValueError):
        return f"{printable_path(path)}: no file can have this name: it holds a null character"
    if problem.errno == errno.ELOOP and "leads out" in (problem.strerror or ""):
        return f"{printable_path(path)}: {problem.strerror}"
    if problem.errno == errno.ELOOP:
        return f"{printable_path(path)}: a symbolic link that leads back to itself"
    if problem.errno in (errno.ENOENT, errno.ENOTDIR):
        try:
            target = path.readlink()
        except (OSError, ValueError):
            return f"{printable_path(path)}: no such file or directory"
        link = f"a symbolic link to {printable_path(target)}, which does not exist"
        return f"{printable_path(path)}: no such file or directory: {link}"
    if problem.errno == errno.ENAMETOOLONG:
        return f"{printable_path(path)}: File name too long"
    return f"{printable_path(path)}: {problem.strerror or problem}"


def printable_path(path: str | os.PathLike[str]) -> str:
    """Return a path for a message: printable, and with its middle left out if it is very long."""
    text = printable(os.fspath(path))
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN // 2]}...{text[-_MAX_SHOWN // 2 :]}"


#: characters that Unicode calls printable and that show nothing: two names that differ in them look the same
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\uffa0\ufe00-\ufe0d\U000e0100-\U000e01ef]"
)


def printable(text: str) -> str:
    """Return ``text`` with every character escaped that could control a terminal or be displayed misleadingly."""
    if is_plain(text):
        return text
    return "".join(c if is_plain(c) else _escaped(c) for c in text)


def is_plain(text: str) -> bool:
    """Return whether a text can be printed without escapes."""
    return text.isprintable() and (text.isascii() or _INVISIBLE.search(text) is None)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
