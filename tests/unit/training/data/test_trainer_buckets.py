"""Buckets of other trainers, against what their own programs chose for 10,000 sizes (tests/data/buckets)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.data.buckets import BucketRules, assign

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[3] / "data" / "buckets" / "trainer_buckets.json").read_text("utf-8")
)
SHAPES = [(1, 1), (4, 3), (3, 2), (16, 9), (2, 3), (9, 16), (5, 4), (21, 9)]


def sizes() -> list[tuple[int, int]]:
    """Return the sizes that the hashes are of: half of them of any shape, half of the usual ones."""
    state, result = 20260216, []

    def below(limit: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % limit

    for _ in range(10_000):
        if below(2):
            result.append((200 + below(4800), 200 + below(4800)))
        else:
            side = 200 + below(4800)
            across, down = SHAPES[below(8)]
            result.append((side, max(1, side * down // across)))
    return result


SIZES = sizes()


def rules_of(case: dict[str, Any]) -> BucketRules:
    facts = {name: case[name] for name in ("step", "minimum", "maximum", "upscale", "enabled", "rule")}
    return BucketRules(tuple(case["resolution"]), **facts)


def chosen(size: tuple[int, int], rules: BucketRules) -> list[int]:
    fit = assign(size, rules)
    left, top, width, height = fit.crop
    assert (width, height) == (fit.bucket.width, fit.bucket.height)
    assert (left, top) == ((fit.resized[0] - width) // 2, (fit.resized[1] - height) // 2) and min(left, top) >= 0
    return [width, height, *fit.resized]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['rule']} {case['resolution']} {case['upscale']}")
def test_sizes_are_those_of_the_trainers_own_programs(case: dict[str, Any]) -> None:
    rules = rules_of(case)
    for *size, width, height, across, down in case["some"]:
        assert chosen((size[0], size[1]), rules) == [width, height, across, down], size
    everything = json.dumps([chosen(size, rules) for size in SIZES], separators=(",", ":"))
    assert hashlib.sha256(everything.encode()).hexdigest() == case["sha256"]


def test_what_a_trainer_cannot_train_has_no_bucket() -> None:
    kohya = BucketRules(512, 64, 256, 1024, upscale=False, rule="kohya")
    musubi = BucketRules(512, 64, upscale=False, rule="musubi")
    for size, rules in (((100_000, 64), kohya), ((40, 500), kohya), ((9, 9), musubi)):
        with pytest.raises(ConfigError, match="smaller than one bucket step"):
            assign(size, rules)
    with pytest.raises(ConfigError, match="no bucket has"):  # kohya refuses limits that exclude the resolution
        BucketRules(1280, 64, 256, 1024, rule="kohya")
    assert BucketRules(1280, 64, 256, 1024, upscale=False, rule="kohya").rule == "kohya"  # they do not count then
