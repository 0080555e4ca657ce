"""Where the time of the test suite goes: CPU seconds per room and per test.

    python -m pytest -n 2 -p tools.test_times --times build/times
    python tools/test_times.py build/times [--tests 150] [FOLDER...]

A test costs what its worker and all processes below it compute between its beginning and its end, fixtures included:
user and system time, which other programs on the machine change less than the time of day. `collect` is what a worker
imports before its first test. Waiting is the rest of a test's wall time. Rooms are the folders of tests/, with those of
tests/unit one by one; FOLDERs are listed file by file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TICK = os.sysconf("SC_CLK_TCK")
_SESSION = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, help="folder for a file per worker with the CPU seconds of every test")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--times"):
        folder.mkdir(parents=True, exist_ok=True)
        config.stash[_SESSION] = folder.resolve() / f"{os.getpid()}.jsonl"


def pytest_collection_finish(session: pytest.Session) -> None:
    _write(session.config, "collect", cpu_seconds(), 0.0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    cpu, wall = cpu_seconds(), time.monotonic()
    try:
        return (yield)
    finally:
        _write(item.config, item.nodeid, cpu_seconds() - cpu, time.monotonic() - wall)


def _write(config: pytest.Config, name: str, cpu: float, wall: float) -> None:
    if (path := config.stash.get(_SESSION, None)) and not (config.getoption("numprocesses", None)):
        with path.open("a") as file:
            print(json.dumps([name, round(cpu, 3), round(wall, 3)]), file=file)


def cpu_seconds() -> float:
    """Return what this process and those below it have computed, ended or not."""
    own = os.times()
    pending, ticks = _children(os.getpid()), 0
    while pending:
        process = pending.pop()
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
        pending += _children(process)
    return own.user + own.system + own.children_user + own.children_system + ticks / _TICK


def _children(process: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def room_of(name: str, details: set[str]) -> str:
    """Return the room of a test, from its id: tests/unit/ops/test_x.py::test_y -> unit/ops."""
    parts = name.partition("::")[0].split("/")[1:]
    folder = "/".join(parts[: min(len(parts) - 1, 2 if parts[:1] == ["unit"] else 1)])
    return f"{folder}/{parts[-1]}" if folder in details else folder or name


def read(folder: Path) -> dict[str, tuple[float, float]]:
    """Return {test: (CPU seconds, wall seconds)}; what workers imported is added up."""
    times: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for file in sorted(folder.glob("*.jsonl")):
        for name, cpu, wall in map(json.loads, file.read_text().splitlines()):
            times[name] = times[name][0] + cpu, times[name][1] + wall
    return dict(times)


def table(times: dict[str, tuple[float, float]], details: set[str]) -> str:
    """Return a Markdown table: room, tests, CPU seconds, share, seconds of waiting, the most expensive test."""
    rooms: dict[str, list[str]] = defaultdict(list)
    for name in times:
        rooms[room_of(name, details)].append(name)
    whole = sum(cpu for cpu, _ in times.values())
    rows = ["| tests/ | tests | CPU seconds | share | waiting | most expensive test |", "|---|---|---|---|---|---|"]
    for room, names in sorted(rooms.items(), key=lambda pair: -sum(times[name][0] for name in pair[1])):
        cpu = sum(times[name][0] for name in names)
        waiting = sum(max(0.0, times[name][1] - times[name][0]) for name in names)
        most = max(names, key=lambda name: times[name][0])
        example = f"{most.partition('::')[2][:70]} ({times[most][0]:.1f} s)" if room != "collect" else ""
        count = len(names) if room != "collect" else 0
        rows.append(f"| {room} | {count:,} | {cpu:.0f} | {cpu / whole:.0%} | {waiting:.0f} | {example} |")
    rows.append(f"| all | {len(times.keys() - {'collect'}):,} | {whole:.0f} | 100% | | |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("times", type=Path, help="the folder of --times")
    parser.add_argument("folders", nargs="*", help="rooms to list file by file")
    parser.add_argument("--tests", type=int, default=0, help="also list this many of the most expensive tests")
    options = parser.parse_intermixed_args()
    times = read(options.times)
    print(table(times, set(options.folders)))
    for name, (cpu, wall) in sorted(times.items(), key=lambda pair: -pair[1][0])[: options.tests]:
        print(f"{cpu:7.1f} {wall:7.1f}  {name}")


if __name__ == "__main__":
    main()
