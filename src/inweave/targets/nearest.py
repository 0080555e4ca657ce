"""The module of a model whose name is nearest to one that it lacks.

A model has thousands of modules and about a hundred *forms* of names: the same name with `#` for each number. Names are
compared by form, each form once; then the numbers choose among the modules of the nearest form.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_NUMBER = re.compile(r"[0-9]+")
_LONGEST = 200  # a longer name is compared by its beginning
_CUTOFF = 0.5


class NearestNames:
    """Nearest names among ``modules``; each form is compared once, however many names ask for it."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules: dict[str, list[str]] = {}
        for module in modules:
            self._modules.setdefault(_form(module), []).append(module)
        self._answers: dict[str, str | None] = {}

    def find(self, name: str) -> str | None:
        """Return the module that looks most like ``name``, dotted or flat, or None."""
        form = _form(name[:_LONGEST])
        if form not in self._answers:
            close = difflib.get_close_matches(form, self._modules, 1, _CUTOFF)
            self._answers[form] = close[0] if close else None
        nearest = self._answers[form]
        if nearest is None:
            return None
        numbers = _numbers(name[:_LONGEST])
        return min(self._modules[nearest], key=lambda module: _distance(numbers, _numbers(module)))


def _form(name: str) -> str:
    return _NUMBER.sub("#", name.replace(".", "_"))


def _numbers(name: str) -> list[int]:
    return [int(digits[:9]) for digits in _NUMBER.findall(name)]


def _distance(numbers: list[int], present: list[int]) -> int:
    pairs = zip(numbers, present, strict=False)
    return sum(abs(a - b) for a, b in pairs) + abs(len(numbers) - len(present))
