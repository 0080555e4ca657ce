"""Wildcards in captions, and the random numbers of a caption.

    {a|b}      one of them; may be nested. Braces without a bar are plain text, as are braces around plain ones

Captions are untrusted, so the text is read once, without recursion.
"""

from __future__ import annotations

import hashlib
import re
from functools import cached_property

import numpy as np


class CaptionRandom:
    """Random numbers seeded by a hash: the raw words of PCG64 are the same on every platform."""

    def __init__(self, seed: int, number: int, caption: str) -> None:
        self._seed = seed, number, caption

    @cached_property
    def _bits(self) -> np.random.PCG64:
        seed, number, caption = self._seed
        text = f"{seed}\0{number}\0{caption}".encode("utf-8", "surrogatepass")
        return np.random.PCG64(int.from_bytes(hashlib.sha256(text).digest()))

    def unit(self) -> float:
        return (int(self._bits.random_raw()) >> 11) * 2.0**-53

    def shuffle(self, tags: list[str]) -> list[str]:
        return [tag for _, tag in sorted(((self.unit(), tag) for tag in tags), key=lambda entry: entry[0])]


class _Braces:
    """A pair of braces: its position, the positions of its own bars, and the pairs directly inside of it."""

    __slots__ = ("bars", "end", "height", "inner", "is_wildcard", "option", "start")

    def __init__(self, start: int) -> None:
        self.start, self.end = start, -1
        self.bars: list[int] = []
        self.inner: list[_Braces] = []
        self.height, self.is_wildcard, self.option = 1, False, 0

    def close(self, end: int) -> None:
        self.end = end
        self.height = 1 + max((group.height for group in self.inner), default=0)
        self.is_wildcard = bool(self.bars) and all(group.is_wildcard for group in self.inner)


def _groups(text: str) -> list[_Braces]:
    """Return all pairs of braces, inner ones first."""
    opened: list[_Braces] = []
    groups: list[_Braces] = []
    for match in re.finditer(r"[{|}]", text):
        sign, position = match[0], match.start()
        if sign == "{":
            opened.append(_Braces(position))
        elif opened and sign == "|":
            opened[-1].bars.append(position)
        elif opened:
            group = opened.pop()
            group.close(position)
            groups.append(group)
            if opened:
                opened[-1].inner.append(group)
    return groups


def has_wildcards(text: str) -> bool:
    return any(group.is_wildcard for group in _groups(text))


def expand_wildcards(text: str, rng: CaptionRandom) -> str:
    """Choose an option of every wildcard; random numbers are drawn from the innermost outward, left to right."""
    wildcards = [group for group in _groups(text) if group.is_wildcard]
    if not wildcards:
        return text
    for group in sorted(wildcards, key=lambda each: (each.height, each.start)):
        group.option = int(rng.unit() * (len(group.bars) + 1))
    starts = {group.start: group for group in wildcards}
    pieces: list[str] = []
    ends = [len(text)]  # of the text, and of the nested options being copied
    after: list[int] = []  # where to continue after each of those options
    position = 0
    braces = re.compile(r"\{")
    while ends:
        match = braces.search(text, position, ends[-1])
        wildcard = starts.get(match.start()) if match else None
        if match and wildcard is None:
            pieces.append(text[position : match.end()])
            position = match.end()
        elif wildcard is not None:
            pieces.append(text[position : wildcard.start])
            borders = [wildcard.start, *wildcard.bars, wildcard.end]
            position = borders[wildcard.option] + 1
            ends.append(borders[wildcard.option + 1])
            after.append(wildcard.end + 1)
        else:
            pieces.append(text[position : ends.pop()])
            position = after.pop() if after else position
    return "".join(pieces)
