"""The stamp of a file: its status, used in cache keys to notice a change without reading the contents.

    (device, inode, size, mtime, ctime)     of a folder or an index of shards also those of the files next to it

A program that rewrites a file in place can keep its size and set its modification time, but not its change time. A new
name, link or mode changes that as well: then a file is read once more than needed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

Stamp = tuple[int, ...]
ABSENT: Stamp = ()


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the stamp of a file with this status."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def path_stamp(path: Path) -> Stamp:
    """Return the stamp of what lies at a path, links followed; `ABSENT` if it cannot be read: opening it says why."""
    try:
        status = path.stat()
        several = stat.S_ISDIR(status.st_mode) or path.name.endswith(".index.json")
        if not several:
            return stamp_of(status)
        with os.scandir(path if stat.S_ISDIR(status.st_mode) else path.parent) as entries:
            files = sorted((entry.name, stamp_of(entry.stat())) for entry in entries if entry.is_file())
    except OSError:
        return ABSENT
    return (*stamp_of(status), *(number for _, stamp in files for number in stamp))
