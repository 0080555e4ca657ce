"""A parsed regular expression as a graph of states (Thompson's construction).

    read      consume one character that the test accepts, go on to `after`
    split     go on to any of `branches`, without consuming
    at        an anchor (^ $ \\A \\Z \\b \\B): go on if it holds here
    look      a lookahead or lookbehind: go on if its own graph, started `back` characters earlier, can reach its end
              (or cannot, where negative)
    end       accepted
    fail      never

A bounded repeat is written out: `x{2,4}` is x x (x (x)?)?. The number of states is bounded before any is made. What one
character or one anchor matches is asked of `re` itself, so flags, classes and case folding are exactly its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any, Literal

MAX_STATES = 10_000

_CHARACTERS = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN)
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
_LOOKS = (_constants.ASSERT, _constants.ASSERT_NOT)
_REFUSED = {
    _constants.GROUPREF: "a backreference",
    _constants.GROUPREF_EXISTS: "a conditional group",
    _constants.ATOMIC_GROUP: "an atomic group (?>...)",
    _constants.POSSESSIVE_REPEAT: "a possessive repeat",
}
_TYPES = re.ASCII | re.LOCALE | re.UNICODE


class UnsupportedPatternError(ValueError):
    """A regular expression that cannot be matched in bounded time; the message says which part of it."""


@dataclass(slots=True, eq=False)
class Node:
    """One state; see the module's docstring for what each kind uses."""

    kind: Literal["read", "split", "at", "look", "end", "fail"]
    after: Node | None = None
    branches: list[Node] = field(default_factory=list)
    test: Callable[[str], bool] | None = None
    anchor: re.Pattern[str] | None = None
    negative: bool = False
    back: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    start: Node
    anywhere: Node  # the same behind any number of characters: for `search`


def compile_program(pattern: str, flags: int = 0) -> Program:
    """Return the graph of an expression; raise `re.error` as `re` does, or `UnsupportedPatternError`."""
    parsed = _parser.parse(pattern, flags)
    if (states := _size(parsed)) > MAX_STATES:
        raise UnsupportedPatternError(
            f"its repeats, written out, need {_about(states)} states; the limit is {MAX_STATES:,}"
        )
    start = _sequence(parsed, parsed.state.flags, Node("end"))
    anywhere = Node("split", branches=[start])
    anywhere.branches.append(Node("read", after=anywhere, test=_anything))
    return Program(start, anywhere)


def _about(number: int) -> str:
    return f"{number:,}" if number < 10**12 else "more than 10^12"


def _anything(character: str) -> bool:
    return True


def _size(parsed: Iterable[tuple[Any, Any]]) -> int:
    """Return the number of states a part needs, counted without making them."""
    total = 0
    for operation, argument in parsed:
        if operation in _REFUSED:
            raise UnsupportedPatternError(f"it has {_REFUSED[operation]}, which cannot be matched in bounded time")
        if operation in _REPEATS:
            least, most, body = argument
            copies = least + 1 if most == _constants.MAXREPEAT else most
            total += (_size(body) + 1) * copies
        elif operation is _constants.BRANCH:
            total += 1 + sum(_size(branch) for branch in argument[1])
        elif operation is _constants.SUBPATTERN:
            total += _size(argument[-1])
        elif operation in _LOOKS:
            total += 2 + _size(argument[1])
        else:
            total += 1
    return total


def _sequence(parsed: Any, flags: int, after: Node) -> Node:
    for operation, argument in reversed(list(parsed)):
        after = _part(operation, argument, flags, after)
    return after


def _part(operation: Any, argument: Any, flags: int, after: Node) -> Node:
    """Return the state where one element starts; behind it comes ``after``."""
    if operation in _CHARACTERS:
        return Node("read", after=after, test=_test(operation, argument, flags))
    if operation is _constants.AT:
        return Node("at", after=after, anchor=_anchor(argument, flags))
    if operation is _constants.BRANCH:
        return Node("split", branches=[_sequence(branch, flags, after) for branch in argument[1]])
    if operation is _constants.SUBPATTERN:
        _, added, removed, body = argument
        if added & _TYPES:
            flags &= ~_TYPES
        return _sequence(body, (flags | added) & ~removed, after)
    if operation in _REPEATS:
        least, most, body = argument
        return _repeat(least, most, body, flags, after)
    if operation in _LOOKS:
        direction, body = argument
        back = body.getwidth()[0] if direction < 0 else 0
        start = _sequence(body, flags, Node("end"))
        return Node("look", after=after, branches=[start], negative=operation is _constants.ASSERT_NOT, back=back)
    if operation is _constants.FAILURE:
        return Node("fail")
    raise UnsupportedPatternError(f"it has {str(operation).lower()}, which is not known here")


def _repeat(least: int, most: Any, body: Any, flags: int, after: Node) -> Node:
    if most == _constants.MAXREPEAT:
        loop = Node("split")
        loop.branches = [_sequence(body, flags, loop), after]
        start = loop
    else:
        start = after
        for _ in range(most - least):
            start = Node("split", branches=[_sequence(body, flags, start), after])
    for _ in range(least):
        start = _sequence(body, flags, start)
    return start


def _test(operation: Any, argument: Any, flags: int) -> Callable[[str], bool]:
    if operation is _constants.LITERAL and not flags & re.IGNORECASE:
        return chr(argument).__eq__
    if operation is _constants.ANY:
        return _anything if flags & re.DOTALL else "\n".__ne__
    pattern = _single(operation, argument, flags)

    @lru_cache(maxsize=256)
    def accepts(character: str) -> bool:
        return pattern.fullmatch(character) is not None

    return accepts


@lru_cache(maxsize=64)
def _anchor(place: Any, flags: int) -> re.Pattern[str]:
    return _single(_constants.AT, place, flags)


def _single(operation: Any, argument: Any, flags: int) -> re.Pattern[str]:
    """Return `re`'s own matcher for one character or one anchor: it cannot take long."""
    state = _parser.State()
    state.flags = flags
    return _compiler.compile(_parser.SubPattern(state, [(operation, argument)]), flags)  # type: ignore[no-any-return]
