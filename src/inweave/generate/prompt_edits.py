"""Prompts that change between steps, and prompts that are composed, in AUTOMATIC1111's grammar.

    prompt          = part (AND part)*     AND is upper case and outside of brackets
    part            = text [: weight]      `a cat :1.2 AND a dog`; 1 where none is there
    [from:to:when]                         `from` in the first `when` steps, `to` in the rest
    [to:when]  [from::when]                the same with nothing before, or nothing after
    [a|b|c]                                another one at every step, in turn
    when                                   a share of the steps (0.5, 1.0), or without a decimal point a number (8)
    \\[ \\] \\: \\|                            the characters themselves

They nest, and weights may be around and inside them. Brackets of any other content, `[word]`, are weights. A
`PromptTemplate` is the text of one part; `PromptTemplate.at` is what it says at one step, weights and all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from inweave.errors import ConfigError, Problem

MAX_DEPTH = 50
MAX_PARTS = 16
AND = "AND"
_TOKEN = re.compile(r"\\.|[()\[\]:|\\]|\bAND\b|[^\\()\[\]:|A]+|A", re.DOTALL)
_NUMBER = re.compile(r"\s*+[+-]?(?:\d++\.?\d*+|\.\d++)\s*+")


@dataclass(frozen=True, slots=True)
class Edit:
    """``before`` until ``when``, ``after`` from then on; ``share``: of the steps, else their number."""

    before: tuple[Node, ...]
    after: tuple[Node, ...]
    when: float
    share: bool

    def choose(self, step: int, steps: int) -> tuple[Node, ...]:
        last = self.when * steps if self.share else self.when
        return self.before if step < math.floor(min(last, steps) + 1e-9) else self.after

    def branches(self) -> tuple[tuple[Node, ...], ...]:
        return self.before, self.after


@dataclass(frozen=True, slots=True)
class Alternation:
    """One of the ``options`` at every step, in turn."""

    options: tuple[tuple[Node, ...], ...]

    def choose(self, step: int, steps: int) -> tuple[Node, ...]:
        return self.options[step % len(self.options)]

    def branches(self) -> tuple[tuple[Node, ...], ...]:
        return self.options


Node = str | Edit | Alternation


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The text of one part of a prompt, which may differ from step to step."""

    nodes: tuple[Node, ...]
    weight: float = 1.0

    @property
    def changes(self) -> bool:
        """Whether it is not the same at every step."""
        return any(not isinstance(node, str) for node in self.nodes)

    def at(self, step: int, steps: int) -> str:
        """Return the text of step ``step``, counted from 0, of ``steps``."""
        text = "".join(_resolve(self.nodes, step, steps))
        return re.sub(r"[ \t]{2,}", " ", text).strip() if self.changes else text.strip()

    def everything(self) -> str:
        """Return the texts of all steps in one."""
        return "".join(_flatten(self.nodes))


@dataclass(frozen=True, slots=True)
class Composition:
    """The parts of a prompt, without those of weight 0 unless it has no other."""

    parts: tuple[PromptTemplate, ...]
    warnings: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether it is one text, the same at every step."""
        return len(self.parts) == 1 and self.parts[0].weight == 1.0 and not self.parts[0].changes

    @property
    def composed(self) -> bool:
        """Whether predictions for several texts, or a weighted one, have to be added up."""
        return len(self.parts) > 1 or self.parts[0].weight != 1.0

    def edited_text(self) -> str:
        """Return the text inside edits and alternations."""
        edits = [node for part in self.parts for node in part.nodes if not isinstance(node, str)]
        return "".join(_flatten(edits))


@dataclass(slots=True)
class _Bracket:
    """One that is open: its kind, where its content starts, and the separators directly inside of it."""

    kind: str
    start: int
    separators: list[int]


class _Reader:
    """Tokens become nodes; a bracket that closes around an edit or an alternation becomes one node."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.depths: list[int] = []  # how deep edits are nested in a node
        self.opened: list[_Bracket] = []
        self.squares = 0  # how many of the open brackets are square
        self.joints: list[int] = []  # the AND outside of all brackets that were closed so far
        self.enclosed = 0  # how many AND are inside of brackets
        self.long = 0  # how many brackets would be edits if they had fewer parts

    def read(self, text: str) -> None:
        for token in _TOKEN.findall(text):
            if token in ("(", "["):
                self.opened.append(_Bracket(token, len(self.nodes) + 1, []))
                self.squares += token == "["
            elif token in (":", "|") and self.opened and self.opened[-1].kind == "[":
                self.opened[-1].separators.append(len(self.nodes))
            elif token == AND:
                self.joints.append(len(self.nodes))
            elif token == ")" and self.opened and self.opened[-1].kind == "(":
                self._enclose(self.opened.pop().start)
            elif token == "]" and self.squares and self._close():
                continue
            self.nodes.append(token)
            self.depths.append(0)

    def _close(self) -> bool:
        """Close the innermost square bracket; whether it was an edit or an alternation, which is then a node."""
        while self.opened[-1].kind != "[":  # parentheses that never close
            self.opened.pop()
        bracket = self.opened.pop()
        self.squares -= 1
        self._enclose(bracket.start)
        node = _edit(self.nodes, bracket)
        if node is None:
            self.long += len(bracket.separators) > 2 and _ends_in_number(self.nodes, bracket)
            return False
        first = bracket.start - 1
        depth = 1 + max(self.depths[first:])
        self.nodes[first:], self.depths[first:] = [node], [depth]
        if depth > MAX_DEPTH:
            raise ConfigError(Problem("prompt", f"[from:to:when] and [a|b] are nested more than {MAX_DEPTH} deep"))
        return True

    def _enclose(self, start: int) -> None:
        """Count the ANDs from ``start`` on as enclosed by brackets."""
        while self.joints and self.joints[-1] >= start:
            self.joints.pop()
            self.enclosed += 1

    def parts(self) -> list[PromptTemplate]:
        if len(self.joints) >= MAX_PARTS:
            reason = f"AND joins {len(self.joints) + 1} prompts; at most {MAX_PARTS} can be composed"
            raise ConfigError(Problem("prompt", reason))
        if not self.joints:
            return [PromptTemplate(_joined(self.nodes))]
        return [_part(nodes) for nodes in _split(self.nodes, 0, self.joints)]


def compose(text: str, *, negative: bool = False) -> Composition:
    """Read a prompt without tags; in a ``negative`` one AND is a word. `ConfigError` where it is beyond the limits."""
    reader = _Reader()
    reader.read(text)
    if negative:
        reader._enclose(0)
    parts = reader.parts()
    warnings = []
    if reader.enclosed:
        place = "in a negative prompt" if negative else "inside of brackets"
        warnings.append(f"AND {place} is read as a plain word")
    if reader.long:
        warnings.append("[...:...:...:0.5] has too many parts and is read as text; write [from:to:when]")
    effective = tuple(part for part in parts if part.weight != 0)
    return Composition(effective or (parts[0],), tuple(warnings))


def literal(text: str) -> str:
    """Return the text of a program without edits and AND, escaped so that it is plain text here too."""
    with suppress(ConfigError):  # one beyond the limits is written as text too
        parts = compose(text).parts
        if len(parts) == 1 and parts[0].nodes == (text,):
            return text
    return re.sub(r"\bAND\b", "and", re.sub(r"(?<!\\)([\[\]])", r"\\\1", text))


def _edit(nodes: Sequence[Node], bracket: _Bracket) -> Edit | Alternation | None:
    """Return the edit or alternation in a bracket that ends here; None for a weight."""
    bars = [at for at in bracket.separators if nodes[at] == "|"]
    if bars:
        return Alternation(tuple(_joined(_unescaped(each)) for each in _split(nodes, bracket.start, bars)))
    if not 1 <= len(bracket.separators) <= 2 or not _ends_in_number(nodes, bracket):
        return None
    before, after = ((), *_split(nodes, bracket.start, bracket.separators))[-3:-1]
    number = str(nodes[-1])
    return Edit(_joined(_unescaped(before)), _joined(_unescaped(after)), float(number), "." in number)


def _ends_in_number(nodes: Sequence[Node], bracket: _Bracket) -> bool:
    """Return whether only a number follows the last separator."""
    last = nodes[-1]
    single = bool(bracket.separators) and bracket.separators[-1] == len(nodes) - 2
    return single and isinstance(last, str) and _NUMBER.fullmatch(last) is not None


def _part(nodes: Sequence[Node]) -> PromptTemplate:
    """Return one part of a composition, with the weight at its end."""
    last = len(nodes)
    while last and isinstance(nodes[last - 1], str) and not str(nodes[last - 1]).strip():
        last -= 1
    if last >= 2 and nodes[last - 2] == ":" and _NUMBER.fullmatch(str(nodes[last - 1])):
        return PromptTemplate(_joined(nodes[: last - 2]), float(str(nodes[last - 1])))
    return PromptTemplate(_joined(nodes))


def _split(nodes: Sequence[Node], start: int, positions: Sequence[int]) -> Iterator[Sequence[Node]]:
    bounds = [start - 1, *positions, len(nodes)]
    for first, last in pairwise(bounds):
        yield nodes[first + 1 : last]


def _unescaped(nodes: Sequence[Node]) -> list[Node]:
    return [node[1:] if isinstance(node, str) and node in ("\\:", "\\|") else node for node in nodes]


def _joined(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes with neighboring texts joined."""
    joined: list[Node] = []
    texts: list[str] = []
    for node in (*nodes, None):
        if isinstance(node, str):
            texts.append(node)
            continue
        if texts:
            joined.append("".join(texts))
            texts = []
        if node is not None:
            joined.append(node)
    return tuple(joined)


def _resolve(nodes: Sequence[Node], step: int, steps: int) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, str):
            yield node
        else:
            yield from _resolve(node.choose(step, steps), step, steps)


def _flatten(nodes: Sequence[Node]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, str):
            yield node
        else:
            for branch in node.branches():
                yield from _flatten(branch)
                yield " "
