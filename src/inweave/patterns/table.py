"""PEFT's pattern tables, {pattern: value}: which of many patterns is the first to match a module.

    `(.*\\.)?(pattern)$` matches from the beginning of the module's name

Most patterns are the names of modules, or their ends: letters, digits, `_`, `-`, dots (each of which stands for any
character), escaped signs, maybe between `^` and `$`. These are looked up by their length and by the places of their
dots, so that thousands of patterns cost little; the others are matched one by one, within the bounds of `Work`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from inweave.errors import ConfigError, InweaveError
from inweave.patterns.regex import Regex, Work, regex

_PARSING = 3000  # what parsing costs, in steps of matching
_PLAIN = re.compile(r"(\^?)((?:[\w.-]|\\[^\w\s])+)\$?")

#: length -> places of the dots that stand for any character -> the text with dots there -> the pattern's position
_Lookup = dict[int, dict[tuple[int, ...], dict[str, int]]]


class PatternTable:
    """``patterns`` in their order, each once; ``field`` is where they come from, for messages."""

    def __init__(self, patterns: Sequence[str], field: str, error: type[InweaveError] = ConfigError) -> None:
        self.patterns = tuple(patterns)
        self._work = Work(field, error)
        self._error = error
        self._ends: _Lookup = {}
        self._wholes: _Lookup = {}
        self._others: list[int] = []
        self._rules: dict[int, Regex] = {}
        self._firsts: dict[str, int | None] = {}
        for position, pattern in enumerate(self.patterns):
            self._add(position, pattern)

    def _add(self, position: int, pattern: str) -> None:
        plain = _PLAIN.fullmatch(pattern)
        if plain is None:
            self._others.append(position)
            return
        anchored, body = plain.groups()
        wild: list[int] = []
        text = ""
        for part in re.findall(r"\\.|\.|[^.\\]+", body):
            if part == ".":
                wild.append(len(text))
            text += part.removeprefix("\\")
        table = (self._wholes if anchored else self._ends).setdefault(len(text), {}).setdefault(tuple(wild), {})
        if table.setdefault(text, position) != position:
            self._others.append(position)  # another spelling of an earlier one

    def first(self, name: str) -> int | None:
        """Return the position of the first pattern that matches a module's name, or None."""
        if name not in self._firsts:
            known = min(self._lookups(name), default=None)
            candidates = range(len(self.patterns)) if "\n" in name else self._others
            for position in candidates:
                if known is not None and position >= known:
                    break
                if self._rule(position).match(name, self._work):
                    known = position
                    break
            self._firsts[name] = known
        return self._firsts[name]

    def problems(self, limit: int) -> list[str]:
        """Return what is wrong with patterns that are not regular expressions, at most ``limit`` messages."""
        messages: list[str] = []
        for position in self._others:
            try:
                self._rule(position)
            except InweaveError as error:
                messages.append(str(error))
            if len(messages) >= limit:
                break
        return messages

    def unmatched(self, names: Iterable[str]) -> list[int]:
        """Return the patterns that match none of the names."""
        names = list(names)
        hits = {position for name in names for position in self._lookups(name)}
        odd = [name for name in names if "\n" in name]
        others = set(self._others)
        return [
            position
            for position in range(len(self.patterns))
            if position not in hits
            and not any(self._rule(position).match(each, self._work) for each in (names if position in others else odd))
        ]

    def _rule(self, position: int) -> Regex:
        if (rule := self._rules.get(position)) is None:
            pattern = self.patterns[position]
            self._work.spend(_PARSING + 100 * len(pattern))
            try:
                rule = self._rules[position] = regex(rf"(.*\.)?({pattern})$", self._work.field, self._error)
            except self._error:
                regex(
                    pattern, self._work.field, self._error
                )  # its own message names it without the surrounding pattern
                raise
        return rule

    def _lookups(self, name: str) -> Iterator[int]:
        """Return the plain patterns that match; none if there is a line break, where `.` and `$` mean something
        else.
        """
        if "\n" in name:
            return
        yield from self._hits(self._wholes, name)
        yield from self._hits(self._ends, name)
        start = name.find(".")
        while start >= 0:
            yield from self._hits(self._ends, name[start + 1 :])
            start = name.find(".", start + 1)

    def _hits(self, lookup: _Lookup, text: str) -> Iterator[int]:
        self._work.spend(1)
        for places, table in lookup.get(len(text), {}).items():
            self._work.spend(1 + len(places))
            letters = list(text)
            for place in places:
                letters[place] = "."
            if (position := table.get("".join(letters))) is not None:
                yield position
