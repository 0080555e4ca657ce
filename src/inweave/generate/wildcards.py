r"""Random choices and wildcards in prompts, decided by the seed: the same seed chooses the same words everywhere.

    {red|green|blue}              one of them; options may hold others, may be empty, and nest
    {3::red|green}                red three times as often
    {2$$red|green|blue}           two different ones, joined by ", "; {1-3$$ and $$...}: up to three, joined by " and "
    __colors__                    a line of colors.txt in a folder of wildcards; __ink/thin__; __c*__: of all that match
    \{  \_                        the characters themselves

A file of wildcards has a line for each value, in UTF-8, likewise with `3::` before a value that is to come up more
often; empty lines and those that begin with # are skipped. Values may hold choices and wildcards. Braces without a bar
or `$$` are plain text. What was resolved resolves to itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from random import Random

from inweave.checked import did_you_mean
from inweave.errors import ConfigError, Problem
from inweave.files.paths import is_folder, printable_path
from inweave.files.reading import read_text
from inweave.files.stamps import Stamp, path_stamp

MAX_DEPTH = 50
MAX_TEXT = 50_000
MAX_FILE = 8 * 1024 * 1024
MAX_FILES = 20_000
_ROUNDS = 20
_NAME = r"[A-Za-z0-9*](?:[\w/*.-]{0,98}?[\w*])?"
_TOKEN = re.compile(rf"\\.|\{{|(?<![\w\\])__({_NAME})__(?!\w)", re.DOTALL)
_SIGN = re.compile(r"\\.|[{}|\[\]]", re.DOTALL)
_PICK = re.compile(r"\s*(\d{1,3})?(?:(-)(\d{1,3})?)?\$\$(?:([^{}|$]{0,40})\$\$)?")
_WEIGHT = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?|\.\d{1,6})::")
_PLAIN = re.compile(rf"\\.|\{{(?=[^{{}}]*(?:\||\$\$))|(?<![\w\\])__(?={_NAME}__(?!\w))", re.DOTALL)
_SPECIAL = re.compile(rf"\\.|\{{|(?<![\w\\])__(?={_NAME}__(?!\w))", re.DOTALL)


class Wildcards:
    """Files of wildcards by name; a name in an earlier folder hides that of a later one."""

    def __init__(self, folders: Iterable[str | Path] = ()) -> None:
        self.folders = tuple(map(Path, folders))

    def names(self) -> list[str]:
        """Return the names of all wildcards, sorted."""
        return sorted(self._files())

    def values(self, pattern: str) -> tuple[tuple[str, float], ...]:
        """Return the values of a name, or of all names that match, with their weights."""
        files = self._files()
        matches = [name for name in sorted(files) if fnmatchcase(name, pattern)] if "*" in pattern else [pattern]
        if not matches or (len(matches) == 1 and matches[0] not in files):
            known = f"there are {', '.join(sorted(files)[:20])}" if files else "there are no wildcards"
            near = did_you_mean(pattern, files)
            reason = f"__{pattern}__: there is no file {pattern}.txt among the wildcards{near}; {known}"
            raise ConfigError(Problem("prompt", f"{reason}. Write \\__{pattern}__ for the text itself"))
        values = [value for name in matches for value in _lines(files[name], path_stamp(files[name]))]
        if not values:
            raise ConfigError(Problem("prompt", f"__{pattern}__: the file holds no line to choose"))
        return tuple(values)

    def _files(self) -> dict[str, Path]:
        files: dict[str, Path] = {}
        for folder in self.folders:
            if not is_folder(folder):
                raise ConfigError(f"{printable_path(folder)}: no such folder of wildcards")
            for path in folder.rglob("*.txt"):
                name = path.relative_to(folder).with_suffix("").as_posix()
                if len(files) < MAX_FILES:
                    files.setdefault(name, path)
        return files


@lru_cache(maxsize=256)
def _lines(path: Path, stamp: Stamp) -> tuple[tuple[str, float], ...]:
    text = read_text(path, MAX_FILE, error=ConfigError)
    lines = [line.strip() for line in text.removeprefix("\ufeff").splitlines()]
    return tuple(_weighted(line) for line in lines if line and not line.startswith("#"))


def has_choices(text: str) -> bool:
    """Return whether a text holds a choice or a wildcard."""
    return any(match[0][0] != "\\" for match in _PLAIN.finditer(text))


def escaped(text: str) -> str:
    """Return a text that resolves to itself, for what another program reads as plain text."""
    if not has_choices(text):
        return text
    return _SPECIAL.sub(lambda match: match[0] if match[0][0] == "\\" else f"\\{match[0]}", text)


def resolved(text: str, wildcards: Wildcards, seed: int, label: str = "prompt") -> str:
    """Return a prompt with every choice made.

    Args:
        text: the prompt.
        wildcards: the files that names mean.
        seed: of the image.
        label: the field in errors; it also tells positive and negative prompts apart, which choose independently.

    Raises:
        ConfigError: there is no such wildcard, or the result is too long or never ends.
    """
    if not has_choices(text):
        return text
    chooser = _Chooser(wildcards, Random(f"{label} {seed}"), label)
    for _ in range(_ROUNDS):  # what is put together may be a choice again
        text, before = chooser.expand(text), text
        if text == before or not has_choices(text):
            return text
    raise ConfigError(Problem(label, "its choices make new ones without end"))


class _Chooser:
    def __init__(self, wildcards: Wildcards, random: Random, label: str) -> None:
        self.wildcards, self.random, self.label = wildcards, random, label
        self.length = 0

    def expand(self, text: str, depth: int = 0) -> str:
        """Return a text with its choices made, from left to right, outer ones first."""
        if depth > MAX_DEPTH:
            reason = f"its choices nest deeper than {MAX_DEPTH}; does a wildcard refer to itself?"
            raise ConfigError(Problem(self.label, reason))
        pairs, pieces, position = _pairs(text), list[str](), 0
        while (match := _TOKEN.search(text, position)) is not None:
            pieces.append(text[position : match.start()])
            position = match.end()
            if match[1] is not None:
                pieces.append(self.expand(self._one(self.wildcards.values(match[1])), depth + 1))
            elif match[0] == "{" and (end := pairs.get(match.start())) is not None:
                chosen = self._braces(text[match.end() : end], depth)
                position = end + 1 if chosen is not None else position
                pieces.append("{" if chosen is None else chosen)
            else:
                pieces.append(match[0])
        result = "".join([*pieces, text[position:]])
        self.length += len(result)
        if self.length > 20 * MAX_TEXT:
            raise ConfigError(Problem(self.label, f"its choices give more than {MAX_TEXT:,} characters"))
        return result

    def _braces(self, inside: str, depth: int) -> str | None:
        """Return what is chosen from the text between braces; None if it is plain text."""
        pick = _PICK.match(inside)
        options = _options(inside[pick.end() :] if pick else inside)
        if pick is None and len(options) == 1:
            return None
        if pick is None:
            return self.expand(self._one([_weighted(each) for each in options]), depth + 1)
        least = int(pick[1]) if pick[1] else 0
        most = int(pick[3]) if pick[3] else len(options) if pick[2] else least
        count = min(least + int(self.random.random() * (max(most, least) - least + 1)), len(options))
        left, chosen = [_weighted(each) for each in options], list[str]()
        for _ in range(count):
            value = self._index(left)
            chosen.append(self.expand(left.pop(value)[0], depth + 1))
        return (", " if pick[4] is None else pick[4]).join(chosen)

    def _one(self, values: Sequence[tuple[str, float]]) -> str:
        return values[self._index(values)][0]

    def _index(self, values: Sequence[tuple[str, float]]) -> int:
        """Return the number of a value, drawn by weights; one random number is used."""
        left = self.random.random() * sum(weight for _, weight in values)
        for number, (_, weight) in enumerate(values):
            left -= weight
            if left < 0:
                return number
        return len(values) - 1


def _weighted(text: str) -> tuple[str, float]:
    weight = _WEIGHT.match(text)
    return (text, 1.0) if weight is None else (text[weight.end() :], float(weight[1]))


def _pairs(text: str) -> dict[int, int]:
    """Return where each brace that is closed is closed."""
    opened, pairs = list[int](), dict[int, int]()
    for match in _SIGN.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            pairs[opened.pop()] = match.start()
    return pairs


def _options(inside: str) -> list[str]:
    """Split at bars that are inside of no other braces or brackets: `[a|b]` changes from step to step."""
    bars, braces, brackets = [-1], 0, 0
    for match in _SIGN.finditer(inside):
        sign = match[0]
        braces += (sign == "{") - (sign == "}")
        brackets = max(0, brackets + (sign == "[") - (sign == "]"))
        if sign == "|" and not braces and not brackets:
            bars.append(match.start())
    return [inside[first + 1 : last] for first, last in pairwise([*bars, len(inside)])]
