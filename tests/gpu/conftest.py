"""Every test begins with nothing compiled, and failures are printed when they happen: a run on a rented machine may be cut off."""

from __future__ import annotations

import os
import sys

import pytest

LINES = 14


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """torch gives up on a function that was compiled for many shapes, whichever tests this process has run before."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """With `-n` the processes that run tests have no terminal: theirs are printed by the one that has."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = report.longreprtext.splitlines()[-LINES:]
        print(f"\n{report.nodeid} failed at {report.when}:", *lines, sep="\n    ", file=sys.__stderr__, flush=True)
