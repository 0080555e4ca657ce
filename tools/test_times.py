"""Print where the time of the test suite goes, per room: `python tools/test_times.py REPORT.xml [FOLDER...]`.

The report is that of `pytest --junitxml`. Rooms are the folders of tests/, with those of tests/unit one by one; folders
given as arguments are listed file by file.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree


def room_of(classname: str, details: set[str]) -> str:
    """Return the room of a test, from its module: tests.unit.ops.test_x -> unit/ops."""
    parts = classname.split(".")[1:]
    module = next((number for number, part in enumerate(parts) if part.startswith("test_")), len(parts))
    folder = "/".join(parts[: min(module, 2 if parts[0] == "unit" else 1)])
    return f"{folder}/{parts[module]}" if folder in details and module < len(parts) else folder


def table(report: Path, details: set[str]) -> str:
    """Return a Markdown table: room, tests, seconds, share, the slowest test."""
    seconds: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        seconds[room_of(case.get("classname", ""), details)].append((float(case.get("time", 0)), case.get("name", "")))
    whole = sum(time for times in seconds.values() for time, _ in times)
    rows = ["| tests/ | tests | seconds | share | slowest test |", "|---|---|---|---|---|"]
    for room, times in sorted(seconds.items(), key=lambda pair: -sum(time for time, _ in pair[1])):
        total, (slowest, name) = sum(time for time, _ in times), max(times)
        rows.append(f"| {room} | {len(times):,} | {total:.0f} | {total / whole:.0%} | {name[:80]} ({slowest:.1f} s) |")
    rows.append(f"| all | {sum(map(len, seconds.values())):,} | {whole:.0f} | 100% | |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1]), set(sys.argv[2:])))
