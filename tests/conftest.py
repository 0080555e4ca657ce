"""Shared by every test: the size of the suite, and an environment that is the same on every machine.

`pytest` runs a sample of long tests: fewer fuzzed files, fewer generated examples, one of several variants. `pytest
--full` (`make test-all`) runs all of them. `@pytest.mark.full` (also on one `pytest.param`) marks tests that run with
`--full` only, `@pytest.mark.sample(3)` runs three variants of a test without it, the first, the last and those that lie
evenly between them, and `tests.support.sized(sample, full)` chooses numbers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import secrets
import signal
import sys
from collections import defaultdict
from collections.abc import Generator

import pytest

from tests.support import FULL

# read once in a process; other users of this machine can reach the ports of Ray: without the token they get no answer
os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})

# otherwise products are rounded by where their operands begin in memory, which a mapped file and a copy of it do not
# share; MKL does so on some processors only, and reads this once
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

#: what a terminal, a CI service or a cluster may have set, and what would change output or start a run among several
CLEARED = (
    "COLUMNS", "LINES", "TERMINAL_WIDTH", "FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "TTY_COMPATIBLE",
    "TTY_INTERACTIVE", "GITHUB_ACTIONS",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "ACCELERATE_USE_CPU",
    "PYTHONDONTWRITEBYTECODE",  # every process would compile torch, diffusers and transformers: 12 s instead of 5
)  # fmt: skip

#: folders whose tests take long, in two halves that take about as long
LONG = (("e2e", "serve", "unit/bench"), ("laws", "peers", "unit/generate", "unit/models", "unit/training"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every test at its full size")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full"):
        os.environ[FULL] = "1"  # read while modules are collected, and by processes that tests start
    for name in CLEARED:
        os.environ.pop(name, None)
    sys.dont_write_bytecode = False  # see CLEARED; processes that tests start have the environment
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may depend on a network, or wait for one
    if not config.getoption("--full"):
        with contextlib.suppress(ImportError):  # a machine with a GPU may have pytest alone
            from hypothesis import settings

            settings.register_profile(
                "sample", derandomize=True
            )  # the same examples everywhere; `--full` looks for new ones
            settings.load_profile("sample")
    with contextlib.suppress(ImportError):
        import typer.testing

        # the tree of commands is made once, and not for each of a thousand calls
        typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]
    # a shell that starts something with `&` makes it and its children ignore Ctrl-C; these tests send it
    for name in ("SIGINT", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        sample = sample_of([item for item in items if not item.get_closest_marker("full")])
        if left_out := [item for item in items if item not in sample]:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item in sample]
    if hasattr(config, "workerinput"):
        items[:] = long_first(items)


def sample_of(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that run without ``--full``: of those marked with `sample(n)`, n variants."""
    sample, variants = set[pytest.Item](), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("sample"):
            variants[item.nodeid.partition("[")[0]].append(item)
        else:
            sample.add(item)
    for each in variants.values():
        mark = each[0].get_closest_marker("sample")
        assert mark is not None
        (size,) = mark.args
        steps = max(1, size - 1)
        sample |= {each[number * (len(each) - 1) // steps] for number in range(min(size, len(each)))}
    return sample


def long_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Two halves of the list, each with what takes long at its beginning and what takes milliseconds at its end.

    Of two workers each starts with one half; one that has nothing left takes the end of the other's. So neither waits
    for a long test that the other began last, and a file whose tests share a server is not divided.
    """

    def belongs(item: pytest.Item, folders: tuple[str, ...]) -> bool:
        return item.nodeid.startswith(tuple(f"tests/{folder}/" for folder in folders))

    first, second = ([item for item in items if belongs(item, folders)] for folders in LONG)
    quick = [item for item in items if not belongs(item, LONG[0] + LONG[1])]
    room = max(0, len(items) // 2 - len(first))
    return [*first, *quick[:room], *second, *quick[room:]]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude libraries and tests from garbage collection: they all stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(5_000, 10, 10)  # objects; 700 are created in no time
        gc.enable()
