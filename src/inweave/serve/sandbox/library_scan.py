"""Scans of the library in a separate process: a hostile file can only crash that one."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from inweave.files.paths import is_folder
from inweave.library import Library
from inweave.serve.engine.child_process import end_process

log = logging.getLogger("inweave.serve")
MAX_SCANS = 20


async def scan_library(library: Library, database: Path, *, examine: bool = False) -> None:
    """Bring the index up to date with the folders; ``examine`` also reads whole files, at the speed of the disk."""
    missing = [folder for folder in library.folders if not is_folder(folder)]
    for folder in missing:  # a disk that is not mounted now: the other folders are scanned all the same
        await asyncio.to_thread(library.hide, folder)
    present = [folder for folder in library.folders if folder not in missing]
    command = [sys.executable, "-P", "-m", "inweave.serve.sandbox.scan_process", str(database)]
    command += [*(["--examine"] if examine else []), *map(str, present)]
    for _ in range(MAX_SCANS):  # a file that crashes the process is tried once more, then skipped
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = await process.wait()
        finally:
            await asyncio.shield(end_process(process))
        if code >= 0:
            break
        log.error("the scan of the library ended unexpectedly (signal %d)", -code)
