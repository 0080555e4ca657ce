"""Marks of processes, to see whether one still runs: process ids are reused, so a mark includes the start time.

mark = "<process id>:<start in clock ticks>"        the second part is empty if the system does not provide it
"""

from __future__ import annotations

import os
from pathlib import Path


def process_mark() -> str:
    """Return the mark of this process."""
    return f"{os.getpid()}:{_start(os.getpid())}"


def is_alive(mark: str) -> bool:
    """Return whether the process of a mark still runs."""
    pid, _, start = mark.partition(":")
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs, and belongs to another user
    return _start(int(pid)) == start


def _start(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
