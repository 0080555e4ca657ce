"""The files that this process opens, recorded by an audit hook."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

EVENTS = ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir", "shutil.rmtree")
OPENED: list[str] | None = None
HOOKED = False


def record_opened(event: str, arguments: tuple[Any, ...]) -> None:
    """Record the path of an audit event while `opened_files` is active."""
    if OPENED is not None and event in EVENTS:
        OPENED.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else "")


@contextlib.contextmanager
def opened_files() -> Iterator[list[str]]:
    """Yield a list of the paths that this process opens, lists, renames or removes meanwhile."""
    global HOOKED, OPENED
    if not HOOKED:  # a hook cannot be removed
        sys.addaudithook(record_opened)
        HOOKED = True
    OPENED = []
    try:
        yield OPENED
    finally:
        OPENED = None
