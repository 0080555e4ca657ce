"""A file of the library as an answer: opened first, without leaving its folder, and sent from what was opened.

An answer that opens a path by itself would follow whatever lies there by then.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from fastapi.responses import FileResponse
from starlette.types import Receive, Scope, Send

from inweave.errors import MissingError
from inweave.files.confinement import descriptor_path, open_beneath


class OpenedFile(FileResponse):
    """The answer with the bytes of a descriptor, which it closes."""

    def __init__(self, descriptor: int, **options: Any) -> None:
        super().__init__(descriptor_path(descriptor), **options)
        self._descriptor = descriptor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._descriptor)


def library_file(root: str, path: str, label: str, **options: Any) -> OpenedFile:
    """What lies at ``path`` in a folder of the library; `MissingError` unless that is a regular file inside of it."""
    try:
        descriptor = open_beneath(Path(root), path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        raise MissingError(f"{label} is not there") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MissingError(f"{label} is not a file")
    return OpenedFile(descriptor, **options)
