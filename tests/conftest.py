"""What every test shares: the size of the suite, and signals that a shell may have switched off.

`pytest` runs a sample of what takes long: fewer fuzzed files, fewer drawn examples, one of several variants. `pytest
--full` (`make test-all`) runs all of it. Two means: `@pytest.mark.full` (also on one `pytest.param`) for tests that run
with `--full` only, and `tests.support.sized(sample, full)` for numbers.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.support import FULL


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every test at its full size")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full"):
        os.environ[FULL] = "1"  # read while modules are collected, and by processes that tests start
    # a shell that starts something with `&` makes it and its children ignore Ctrl-C; these tests send it
    for name in ("SIGINT", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
