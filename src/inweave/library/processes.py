"""Which process reads a file, and whether it still lives: process ids are used again, so the start time belongs to it.

mark = "<process id>:<start in clock ticks>"        the second part is empty where the system does not tell
"""

from __future__ import annotations

import os
from pathlib import Path


def process_mark() -> str:
    """The mark of this process."""
    return f"{os.getpid()}:{_start(os.getpid())}"


def is_alive(mark: str) -> bool:
    """Whether the process of a mark still runs."""
    pid, _, start = mark.partition(":")
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it lives, and belongs to somebody else
    return _start(int(pid)) == start


def _start(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
