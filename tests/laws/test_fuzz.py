"""One law for all readers: any file is read or raises an InweaveError, quickly, in memory bounded by its size.

8,000 inputs by default, 200,000 with --full; input `n` of a reader is the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

from tests.fuzz import harness, mutate, readers
from tests.fuzz.adapters import ADAPTER_READERS
from tests.support import sized

READERS = (*ADAPTER_READERS, *readers.READERS)
TOTAL = sized(4_000, 200_000)
PARTS = sized(1, 4)  # of a reader, so that several processes can share its inputs
SHARE = TOTAL / sum(reader.share for reader in READERS)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_nothing_but_our_errors(reader: harness.Reader, part: int, tmp_path: Path) -> None:
    count = round(SHARE * reader.share / PARTS)
    outcome = harness.run(reader, range(part * count, (part + 1) * count), tmp_path)
    assert outcome["refused"] or not reader.refuses, (
        "nothing was refused: the damage does no harm, so this proves nothing"
    )
    assert outcome["read"], "nothing was read: the damage never gets past the first check"


def test_an_input_depends_on_its_number_alone() -> None:
    """No input leaves a trace in the ones after it: the same numbers in the opposite order are the same inputs."""

    def inputs(numbers: range, readers: Sequence[harness.Reader]) -> dict[str, str]:
        labels = [(reader, f"{reader.name}/{number}") for reader in readers for number in numbers]
        return {label: repr(reader.make(random.Random(label))) for reader, label in labels}

    values, count = repr(mutate.VALUES), sized(30, 1000)
    assert inputs(range(count), READERS) == inputs(range(count)[::-1], READERS[::-1])
    assert repr(mutate.VALUES) == values


def test_a_reader_that_fails_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: another error, a slow reader and a large one are told apart from a good one."""

    def fail(value: int | None, folder: Path) -> None:
        if value is not None:
            raise KeyError(value)

    def waste(value: int | None, folder: Path) -> bytes:
        return bytes(50 * 2**20)

    def slow(value: int | None, folder: Path) -> int:
        return sum(range(0 if value is None else 3_000_000))

    def make(rng: random.Random) -> int:
        return rng.randrange(10)

    monkeypatch.setattr(harness, "WARM", 0)
    monkeypatch.setattr(harness, "SLOWEST", 0.02)
    for read, what in ((fail, "not one of our errors"), (waste, "bytes of"), (slow, " s\n")):
        with pytest.raises(AssertionError, match=what):
            harness.run(harness.Reader("x", None, make, read), range(1, 11), tmp_path)
    assert harness.run(harness.Reader("x", None, make, lambda value, folder: value), range(10), tmp_path)["read"] == 10
