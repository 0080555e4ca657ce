"""Files of the library and the gallery in answers: opened first, without leaving their folder.

They are sent from the descriptor: a response that opens a path by itself would follow a link that came in between.
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
    """A response with the bytes of a descriptor, which it closes."""

    def __init__(self, descriptor: int, **options: Any) -> None:
        super().__init__(descriptor_path(descriptor), **options)
        self._descriptor = descriptor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._descriptor)


def library_file(root: str, path: str, label: str, **options: Any) -> OpenedFile:
    """Return a file of a folder that other programs write to; raise MissingError unless it is one."""
    try:
        descriptor = open_beneath(Path(root), path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        raise MissingError(f"{label} is not there") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MissingError(f"{label} is not a file")
    return OpenedFile(descriptor, **options)
