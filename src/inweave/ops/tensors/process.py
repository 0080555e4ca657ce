"""The host memory of this process, and what is left of the machine's, as Linux counts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

_STATUS, _MACHINE = Path("/proc/self/status"), Path("/proc/meminfo")
_GROUPS, _GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def process_memory() -> tuple[int, int] | None:
    """Return (bytes of its own, the most resident bytes since its start, mapped files included); None elsewhere."""
    try:
        lines = _sizes(_STATUS)
        return lines["RssAnon"], lines["VmHWM"]
    except (OSError, KeyError):
        return None


def available_memory() -> int | None:
    """Return the bytes that this process can still take before the system ends one; None elsewhere.

    Pages of files are given back when they are needed, and count as available; so does free swap space.
    """
    try:
        lines = _sizes(_MACHINE)
        free = lines["MemAvailable"] + lines.get("SwapFree", 0)
    except (OSError, KeyError):
        return None
    return min([free, *_left_in_groups()])


def _sizes(path: Path) -> dict[str, int]:
    """Return the figures of a file of /proc that are in kB, in bytes."""
    words = (line.split() for line in path.read_text("utf-8").splitlines())
    return {each[0].rstrip(":"): int(each[1]) << 10 for each in words if each[2:] == ["kB"]}


def _left_in_groups() -> Iterator[int]:
    """Yield what is left of the limit of each control group that this process is in: of a container, for example."""
    for folder in _limited_groups():
        with suppress(OSError, ValueError, KeyError):
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            counts = {name: int(count) for name, count in lines}
            yield limit - used + counts["inactive_file"] + counts["active_file"]


@cache
def _limited_groups() -> tuple[Path, ...]:
    """Return the folders of the control groups (version 2) of this process that have a limit."""
    folders: list[Path] = []
    with suppress(OSError, StopIteration):
        lines = _GROUP.read_text("utf-8").splitlines()
        own = _GROUPS / next(line for line in lines if line.startswith("0::")).removeprefix("0::").lstrip("/")
        folders = [folder for folder in (own, *own.parents) if folder.is_relative_to(_GROUPS)]
    limited = []
    for folder in folders:
        with suppress(OSError):
            if (folder / "memory.max").read_text().strip() != "max":
                limited.append(folder)
    return tuple(limited)
