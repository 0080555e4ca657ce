"""Every test begins with nothing compiled, long tests come first, and failures are printed when they happen.

A run on a rented machine may be cut off.
"""

from __future__ import annotations

import os
import sys

import pytest

LINES = 14
LONG = ("test_compile.py", "compiled", "test_whole_step.py", "test_training.py")  # the longest first


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Reset the compiler: torch gives up on a function that previous tests of this process compiled for many shapes."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Distribute the tests that compile, which take most of the time, over the workers."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1 and all("tests/gpu/" in item.nodeid for item in items):
        items[:] = shares(items, workers)


def shares(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order tests for xdist's `worksteal`, which gives each worker a contiguous part: each begins with long tests."""

    def place(item: pytest.Item) -> int:
        return next((place for place, name in enumerate(LONG) if name in item.nodeid), len(LONG))

    long = sorted((item for item in items if place(item) < len(LONG)), key=place)
    quick = [item for item in items if place(item) == len(LONG)]
    ordered: list[pytest.Item] = []
    for number in range(workers):
        count = (len(items) - len(ordered)) // (workers - number)
        share = long[number::workers]
        room = max(0, count - len(share))
        ordered += [*share, *quick[:room]]
        del quick[:room]
    return ordered + quick


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """With `-n` the processes that run tests have no terminal: theirs are printed by the one that has."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = report.longreprtext.splitlines()[-LINES:]
        print(f"\n{report.nodeid} failed at {report.when}:", *lines, sep="\n    ", file=sys.__stderr__, flush=True)
