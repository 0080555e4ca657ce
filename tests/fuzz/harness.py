"""Runs a reader on many damaged inputs: nothing but our errors, each soon, and in memory that its size allows.

Input ``n`` of a reader is a function of its name and of n alone, so that a failure is repeated by its number.
"""

from __future__ import annotations

import random
import time
import traceback
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inweave.errors import InweaveError
from tests.support import stopwatch

SLOWEST = 1.0  # seconds of CPU per input
TIMES, ALLOWANCE = 3, 8 * 2**20  # memory: this multiple of its size, plus these bytes
WARM = 20  # inputs before anything is counted: they trigger late imports and fill caches
MEASURED = 10  # memory is measured for one of this many inputs, since it takes time


@dataclass(frozen=True, slots=True)
class Reader:
    """``good``: an input that is read; ``make`` a damaged one from a random generator; ``read`` it in a folder."""

    name: str
    good: Any
    make: Callable[[random.Random], Any]
    read: Callable[[Any, Path], object]
    share: int = 1  # of all inputs, in relation to the other readers
    allowance: int = ALLOWANCE
    refuses: bool = True  # False where whatever comes is text


def size_of(value: Any) -> int:
    """How many bytes an input takes in its files."""
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return sum(size_of(name) + size_of(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return sum(map(size_of, value))
    return 8


def attempt(reader: Reader, value: Any, label: str, folder: Path) -> str:
    """ "read" or "refused"; whatever else happens is an error that tells the input."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.read(value, folder)
        return "read"
    except InweaveError as error:
        text = str(error)
        assert text and len(text) < 100_000, f"{label}: an error of {len(text)} characters"
        return "refused"
    except Exception:
        raise AssertionError(
            f"{label}: not one of our errors\n{traceback.format_exc()}\ninput: {value!r:.3000}"
        ) from None


def run(reader: Reader, numbers: range, folder: Path) -> Counter[str]:
    """How many inputs were read and how many refused, after checking what each of them took."""
    assert attempt(reader, reader.good, f"{reader.name}/good", folder) == "read"
    for number in range(WARM):
        label = f"{reader.name}/warm/{number}"
        attempt(reader, reader.make(random.Random(label)), label, folder)
    outcomes: Counter[str] = Counter()
    for number in numbers:
        label = f"{reader.name}/{number}"
        value = reader.make(random.Random(label))
        measured = number % MEASURED == 0
        if measured:
            tracemalloc.start()
        try:
            with stopwatch(time.process_time) as cost:
                outcomes[attempt(reader, value, label, folder)] += 1
            peak = tracemalloc.get_traced_memory()[1] if measured else 0
        finally:
            if measured:
                tracemalloc.stop()
        limit = SLOWEST * (5 if measured else 1)  # tracing takes a few times as long
        assert cost.seconds < limit, f"{label}: {cost.seconds:.2f} s\ninput: {value!r:.3000}"
        allowed = TIMES * size_of(value) + reader.allowance
        assert peak < allowed, f"{label}: {peak:,} bytes of {allowed:,}\ninput: {value!r:.3000}"
    return outcomes
