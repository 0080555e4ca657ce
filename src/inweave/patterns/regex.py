"""Matching: all states an expression can be in are followed at once, one character after the other.

    work = O(states * characters), times the characters once more for each level of lookaheads

Nothing is tried twice, so nothing can explode. Sets of states are remembered together with where a character leads
(a deterministic automaton that is built as names need it), so that a second name of the same kind costs one look-up
per character. Sets that an anchor or a lookahead took part in depend on the place and are not remembered.

`Work` counts the steps of everything that is matched for one purpose, and refuses what would take seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from inweave.errors import ConfigError, InweaveError
from inweave.patterns.program import Node, Program, UnsupportedPatternError, compile_program

MAX_LENGTH = 16_384
_REMEMBERED = 100_000  # states in all the sets of an expression
_STEPS = 6_000_000
_BUILDING = 4  # what a state of a new set costs, in steps through known ones


@dataclass(slots=True)
class Work:
    """The steps left for matching one purpose's patterns, about a second of them at first."""

    field: str
    error: type[InweaveError] = ConfigError
    left: int = _STEPS

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise self.error(
                f"{self.field}: matching these patterns takes more than {_STEPS:,} steps; use fewer patterns, "
                "or plain names of modules, which are looked up"
            )


@dataclass(slots=True, eq=False)
class _Set:
    """The states that can be reached without reading: those that read, and whether the end is one of them."""

    readers: tuple[Node, ...]
    accepts: bool
    moves: dict[str, _Set | frozenset[Node]] = field(default_factory=dict)


class _Sets(dict[frozenset[Node], _Set]):
    """The sets that do not depend on the place, by what they were reached from; emptied when they become too many."""

    size = 0

    def remember(self, seeds: frozenset[Node], made: _Set) -> None:
        self.size += len(seeds) + len(made.readers)
        if self.size > _REMEMBERED:
            self.clear()
            self.size = len(seeds) + len(made.readers)
        self[seeds] = made


class Regex:
    """An expression that answers yes or no, exactly as `re` does."""

    def __init__(self, pattern: str, program: Program) -> None:
        self.pattern = pattern
        self._program = program
        self._sets = _Sets()

    def fullmatch(self, text: str, work: Work | None = None) -> bool:
        return self._matches(self._program.start, text, work, whole=True)

    def match(self, text: str, work: Work | None = None) -> bool:
        """Match at the beginning of the text."""
        return self._matches(self._program.start, text, work, whole=False)

    def search(self, text: str, work: Work | None = None) -> bool:
        """Anywhere in the text."""
        return self._matches(self._program.anywhere, text, work, whole=False)

    def _matches(self, start: Node, text: str, work: Work | None, *, whole: bool) -> bool:
        return _Run(self._sets, text, work or Work(f"pattern {self.pattern[:60]!r}")).reaches_end(start, 0, whole=whole)


class _Run:
    """One text being matched."""

    def __init__(self, sets: _Sets, text: str, work: Work) -> None:
        self.sets = sets
        self.text = text
        self.work = work
        self.looks: dict[tuple[Node, int], bool] = {}

    def reaches_end(self, start: Node, begin: int, *, whole: bool) -> bool:
        current = self._closure(frozenset([start]), begin)
        position, end = begin, len(self.text)
        while position < end and current.readers and (whole or not current.accepts):
            target = current.moves.get(self.text[position])
            current = target if target.__class__ is _Set else self._move(current, position)
            position += 1
        self.work.spend(position - begin)
        return current.accepts and (position == end or not whole)

    def _move(self, current: _Set, position: int) -> _Set:
        """Return the set after one character, if it is not known yet or depends on the position."""
        character = self.text[position]
        target = current.moves.get(character)
        if target is None:
            self.work.spend(_BUILDING * len(current.readers))
            target = frozenset(n.after for n in current.readers if n.after and n.test and n.test(character))
        if isinstance(target, frozenset):
            seeds, target = target, self._closure(target, position + 1)
            current.moves[character] = target if self.sets.get(seeds) is target else seeds
        return target

    def _closure(self, seeds: frozenset[Node], position: int) -> _Set:
        if (known := self.sets.get(seeds)) is not None:
            return known
        readers: list[Node] = []
        accepts, depends = False, False
        seen, pending = set(seeds), list(seeds)
        while pending:
            node = pending.pop()
            reached: list[Node] = []
            if node.kind == "read":
                readers.append(node)
            elif node.kind == "end":
                accepts = True
            elif node.kind == "split":
                reached = node.branches
            elif node.kind in ("at", "look"):
                depends = True
                if node.after is not None and self._holds(node, position):
                    reached = [node.after]
            for each in reached:
                if each not in seen:
                    seen.add(each)
                    pending.append(each)
        self.work.spend(_BUILDING * len(seen))
        made = _Set(tuple(readers), accepts)
        if not depends:
            self.sets.remember(seeds, made)
        return made

    def _holds(self, node: Node, position: int) -> bool:
        if node.anchor is not None:
            return node.anchor.match(self.text, position) is not None
        if (known := self.looks.get((node, position))) is None:
            begin = position - node.back
            known = begin >= 0 and self.reaches_end(node.branches[0], begin, whole=False)
            self.looks[node, position] = known
        return known is not node.negative


@lru_cache(maxsize=256)
def _compiled(text: str, flags: int) -> Regex:
    return Regex(text, compile_program(text, flags))


def regex(pattern: str | re.Pattern[str], field: str = "", error: type[InweaveError] = ConfigError) -> Regex:
    """Return an expression ready to match; raise ``error`` if it is invalid or cannot be matched in bounded time.

    ``field``: where it comes from, for messages.
    """
    text, flags = (pattern.pattern, pattern.flags) if isinstance(pattern, re.Pattern) else (pattern, 0)
    label = f"{field}: " if field else ""
    if not isinstance(text, str):
        raise error(f"{label}a regular expression must be text, got {type(text).__name__}")
    short = repr(text) if len(text) <= 60 else f"{text[:60]!r}..."
    if len(text) > MAX_LENGTH:
        raise error(f"{label}the pattern {short} has {len(text):,} characters; the limit is {MAX_LENGTH:,}")
    try:
        return _compiled(text, flags)
    except UnsupportedPatternError as problem:
        raise error(f"{label}the pattern {short} cannot be used: {problem}") from None
    except re.error as problem:
        raise error(f"{label}{short} is not a regular expression: {problem}") from None
    except (RecursionError, OverflowError, MemoryError):
        raise error(
            f"{label}{short} is not a regular expression: it is nested too deeply or its counts are too large"
        ) from None
