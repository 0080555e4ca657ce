"""Regularization images in the number of the others, as kohya's scripts balance them.

n = sum of the repeats of all other images
images are taken in order, each with its own repeats, until they are n or more; the rest is left out
if all of them are fewer than n, they get one more repeat each, in order and again, until they are n
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inweave.training.data.types import Example


def balanced(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Return (examples whose regularization images are as many as the others, those that are left out)."""
    missing = sum(example.repeats for example in examples if not example.regularization)
    used: set[int] = set()
    for number, example in enumerate(examples):
        if example.regularization and missing > 0:
            used.add(number)
            missing -= example.repeats
    more, first = divmod(max(missing, 0), max(len(used), 1))
    rank = {number: place for place, number in enumerate(sorted(used))}
    result: list[Example] = []
    out: list[Example] = []
    for number, example in enumerate(examples):
        if number in used:
            result.append(replace(example, repeats=example.repeats + more + (rank[number] < first)))
        else:
            (out if example.regularization else result).append(example)
    return result, out
