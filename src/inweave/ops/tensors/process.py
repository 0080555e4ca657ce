"""The host memory of this process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")


def process_memory() -> tuple[int, int] | None:
    """Return (bytes of its own, the most resident bytes since its start, mapped files included); None elsewhere."""
    try:
        lines = dict(line.split(":", 1) for line in _STATUS.read_text("utf-8").splitlines() if ":" in line)
        own, peak = (int(lines[name].split()[0]) << 10 for name in ("RssAnon", "VmHWM"))
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return own, peak
