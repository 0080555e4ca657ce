"""Failures are printed when they happen, with the end of their report: a run on a rented machine may be cut off before its summary."""

from __future__ import annotations

import os
import sys

import pytest

LINES = 14


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """With `-n` the processes that run tests have no terminal: theirs are printed by the one that has."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = report.longreprtext.splitlines()[-LINES:]
        print(f"\n{report.nodeid} failed at {report.when}:", *lines, sep="\n    ", file=sys.__stderr__, flush=True)
