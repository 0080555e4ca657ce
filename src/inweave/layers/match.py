"""Matching of targets with module names, by PEFT's rules.

    targets = "all-linear"        every Linear and Conv1D except the model's output head
            | "regex" | Pattern   the whole dotted name must match; a plain name is also tried as a list entry
            | [entry, ...]        entry: the whole dotted name, or its end after a dot; a Pattern as above

    rank_pattern, alpha_pattern   {regex: number}; `(.*\\.)?(regex)$` on the dotted name, the first match wins

An entry or a pattern that matches nothing is an error that suggests the closest module names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from inweave.errors import ConfigError
from inweave.formats.config import ends
from inweave.patterns import PatternTable, Work, regex

Targets = str | re.Pattern[str] | Iterable[str | re.Pattern[str]]
ALL_LINEAR = "all-linear"
_LISTED = 10  # problems of one kind
_COMPARED = 2000  # names that a misspelled name is compared with


def matching(targets: Targets, names: Iterable[str], known: Iterable[str], field: str = "targets") -> list[str]:
    """Return the ``names`` that ``targets`` matches, in their order; errors suggest names from ``known``."""
    names = list(names)
    if isinstance(targets, Mapping):
        raise ConfigError(
            f"{field}: expected names or regular expressions, got a mapping; rank_pattern gives ranks by name"
        )
    if not isinstance(targets, Iterable | re.Pattern):
        raise ConfigError(f"{field}: expected names or regular expressions, got {type(targets).__name__}")
    entries = [targets] if isinstance(targets, str | re.Pattern) else list(targets)
    if not entries:
        raise ConfigError(f"{field} is empty: name the modules that take LoRA, or use 'all-linear'")
    for entry in entries:
        if not isinstance(entry, str | re.Pattern):
            raise ConfigError(f"{field}: expected names or regular expressions, got {type(entry).__name__}")
    by_end: dict[str, set[str]] = {}
    for name in names:
        for end in ends(name):
            by_end.setdefault(end, set()).add(name)
    work = Work(field)
    unused: list[str | re.Pattern[str]] = []
    matched: set[str] = set()
    for entry in dict.fromkeys(entries):
        hits = by_end.get(entry, set()) if isinstance(entry, str) else set()
        if isinstance(targets, str) or isinstance(entry, re.Pattern):
            rule = regex(entry, field)
            hits = hits | {name for name in names if rule.fullmatch(name, work)}
        if not hits:
            unused.append(entry)
        matched |= hits
    if unused:
        raise ConfigError(_nothing(unused, known, field.removesuffix("s")))
    return [name for name in names if name in matched]


def check_patterns(field: str, patterns: Mapping[str, object], names: Iterable[str]) -> list[str]:
    """Return the problems of a pattern table: invalid regular expressions, and patterns that match no name."""
    names = list(names)
    if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        return [f"{field}: a regular expression must be text, got {type(wrong[0]).__name__}"]
    table = PatternTable(tuple(patterns), field)
    if problems := table.problems(_LISTED):
        return problems
    try:
        return _nothing([table.patterns[position] for position in table.unmatched(names)], names, field)
    except ConfigError as error:
        return [*map(str, error.problems)]


def _nothing(entries: Sequence[str | re.Pattern[str]], known: Iterable[str], field: str) -> list[str]:
    """Return a message for each of the first entries without a match; searching for similar names is expensive."""
    known = list(known)
    problems: list[str] = []
    for entry in entries[:_LISTED]:
        text = entry.pattern if isinstance(entry, re.Pattern) else entry
        near = nearest(text, known)
        short = repr(text) if len(text) <= 80 else f"{text[:80]!r}..."
        problems.append(f"{field} {short} matches no module" + (f"; the nearest are {', '.join(near)}" if near else ""))
    return problems + ([f"and {len(entries) - _LISTED} more match none"] if len(entries) > _LISTED else [])


def nearest(text: str, names: Iterable[str], limit: int = 4) -> list[str]:
    """Return names, or ends of names, that are similar to ``text``."""
    tails: dict[str, None] = {}
    depth = text.count(".") + 1
    for name in names:
        parts = name.split(".")
        tails.setdefault(".".join(parts[-depth:]))
        tails.setdefault(parts[-1])
    close = difflib.get_close_matches(text[:100], list(tails)[:_COMPARED], limit, 0.5)
    return close or sorted(tail for tail in tails if not tail.isdigit())[:limit]
