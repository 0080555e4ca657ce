"""A compact spelling for long listings of tensor names with shapes.

    "transformer_blocks.[0-18].attn.to_q.weight": [3072, 3072]

means 19 tensors. `[0-3,7]` lists ranges and single numbers; several brackets in one name mean all
combinations. `expand` and `pack` are inverse to each other up to the order of the names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

Shape = tuple[int, ...]
_BRACKET = re.compile(r"\[([0-9,-]+)\]")
_STACK = re.compile(r"[^\[\]]*?\.\[([0-9,-]+)\]\.")
_SHORT = 4
_NUMBER = re.compile(r"\d+")
_PADDED = re.compile(r"(?<!\d)0\d")


def expand(packed: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
    """Return every name of a packed listing with its shape."""
    names: dict[str, Shape] = {}
    for pattern, shape in packed.items():
        size = tuple(shape)
        pieces = _BRACKET.split(pattern)
        if len(pieces) == 1:
            names[pattern] = size
            continue
        choices = [numbers_of(spec) for spec in pieces[1::2]]
        for combination in itertools.product(*choices):
            name = pieces[0] + "".join(n + tail for n, tail in zip(combination, pieces[2::2], strict=True))
            names[name] = size
    return names


def expand_inner(packed: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
    """Like `expand`, but the range that counts the blocks of the outermost stack stays a range in the names.

    A short range is expanded nevertheless: it may be `mlp.[0,2]`, two layers with names of their own in the other
    naming.
    """
    names: dict[str, Shape] = {}
    for pattern, shape in packed.items():
        stack = _STACK.match(pattern)
        if stack is None or len(numbers_of(stack[1])) <= _SHORT:
            names |= expand({pattern: shape})
            continue
        start, end = stack.start(1) - 1, stack.end(1) + 1
        inner = expand({pattern[:start] + "\0" + pattern[end:]: shape})
        names |= {name.replace("\0", pattern[start:end]): size for name, size in inner.items()}
    return names


def pack(names: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return the shortest listing this grammar finds for ``names``."""
    groups: dict[tuple[tuple[str, ...], Shape], set[tuple[int, ...]]] = {}
    packed: dict[str, list[int]] = {}
    for name, shape in names.items():
        if _PADDED.search(name):  # w_a_007 is not w_a_7
            packed[name] = list(shape)
            continue
        template = tuple(_NUMBER.split(name))
        numbers = tuple(int(n) for n in _NUMBER.findall(name))
        groups.setdefault((template, tuple(shape)), set()).add(numbers)
    for (template, shape), tuples in groups.items():
        for slots in _products(tuples):
            ranges = [_ranges(values) for values in slots] + [""]
            packed["".join(text + slot for text, slot in zip(template, ranges, strict=True))] = list(shape)
    return packed


def _products(tuples: set[tuple[int, ...]]) -> Iterable[list[list[int]]]:
    """Cut a set of index tuples into sets of all combinations of a few numbers a slot."""
    if not next(iter(tuples)):
        yield []
        return
    by_rest: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first in sorted({numbers[0] for numbers in tuples}):
        rest = frozenset(numbers[1:] for numbers in tuples if numbers[0] == first)
        by_rest.setdefault(rest, []).append(first)
    for rest, firsts in by_rest.items():
        for tail in _products(set(rest)):
            yield [firsts, *tail]


def _ranges(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return "[" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "]"


def numbers_of(spec: str) -> list[str]:
    """Return the numbers between two brackets."""
    numbers: list[str] = []
    for run in spec.split(","):
        first, _, last = run.partition("-")
        numbers += [str(n) for n in range(int(first), int(last or first) + 1)]
    return numbers
