"""Which modules a target names: the rules PEFT users know.

    targets = "all-linear"        every Linear and Conv1D but the model's output head
            | "regex" | Pattern   the whole dotted name must match; a plain name is also tried as a list entry
            | [entry, ...]        entry: the whole dotted name, or its end after a dot; a Pattern as above

    rank_pattern, alpha_pattern   {regex: number}; `(.*\\.)?(regex)$` on the dotted name, the first match wins

An entry or a pattern that matches nothing is an error that names the closest module names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from inweave.errors import ConfigError

Targets = str | re.Pattern[str] | Iterable[str | re.Pattern[str]]
ALL_LINEAR = "all-linear"


def matching(targets: Targets, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Those of ``names`` that ``targets`` matches, in their order; ``known``: what to suggest from."""
    names = list(names)
    if not isinstance(targets, Iterable | re.Pattern):
        raise ConfigError(f"targets: expected names or regular expressions, got {type(targets).__name__}")
    entries = [targets] if isinstance(targets, str | re.Pattern) else list(targets)
    if not entries:
        raise ConfigError("targets is empty: name the modules that take LoRA, or use 'all-linear'")
    whole = isinstance(targets, str)
    problems, matched = [], set()
    for entry in entries:
        hits = {name for name in names if _matches(entry, name, whole=whole)}
        if not hits:
            problems.append(_nothing(entry, known, "target"))
        matched |= hits
    if problems:
        raise ConfigError(problems)
    return [name for name in names if name in matched]


def _matches(entry: str | re.Pattern[str], name: str, *, whole: bool) -> bool:
    if isinstance(entry, re.Pattern):
        return entry.fullmatch(name) is not None
    if name == entry or name.endswith(f".{entry}"):
        return True
    return whole and compiled(entry, "targets").fullmatch(name) is not None


def check_patterns(field: str, patterns: Mapping[str, object], names: Iterable[str]) -> list[str]:
    """What is wrong with a pattern table: no regular expression, or nothing it applies to."""
    names = list(names)
    problems: list[str] = []
    for pattern in patterns:
        try:
            rule = compiled(rf"(.*\.)?({pattern})$", field)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        if not any(rule.match(name) for name in names):
            problems.append(_nothing(pattern, names, field))
    return problems


def compiled(pattern: str, field: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{field}: {pattern!r} is not a regular expression: {error}") from None


def _nothing(entry: str | re.Pattern[str], known: Iterable[str], field: str) -> str:
    text = entry.pattern if isinstance(entry, re.Pattern) else entry
    near = nearest(text, known)
    return f"{field} {text!r} matches no module" + (f"; the nearest are {', '.join(near)}" if near else "")


def nearest(text: str, names: Iterable[str], limit: int = 4) -> list[str]:
    """Names, or ends of names, that look like ``text``."""
    ends: dict[str, None] = {}
    depth = text.count(".") + 1
    for name in names:
        parts = name.split(".")
        ends.setdefault(".".join(parts[-depth:]))
        ends.setdefault(parts[-1])
    close = difflib.get_close_matches(text, ends, limit, 0.5)
    return close or sorted(end for end in ends if not end.isdigit())[:limit]
