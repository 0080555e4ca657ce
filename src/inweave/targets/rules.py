"""Name tables written as text, one rule per line, readable in both directions.

diffusers module   original module   [rows] [swap | swap-last | transpose | last]

{i} {j}      any number, the same on both sides
one column   the same name in both namings
=name        a tensor by its whole name; other names stand for their .weight and .bias
qkv:0        first of three row parts; sizes (in, (out-in)/2, (out-in)/2), where `in` is the width
             of the fused weight: thirds for plain attention, and right for grouped keys too
qkvm:3       fourth of (in, in, in, rest): attention and MLP input of one linear
2/3          second of three equal row parts
in:1/2       the other way around: the original is the first of two equal row parts of the diffusers tensor
rows:6       the original is flat: the diffusers tensor has the same values in six rows
swap         the two halves of the rows change places (scale, shift <-> shift, scale)
swap-last    the same, in the last block only
last         the rule holds in the last block only; it comes before the rule for the others
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from inweave.targets.links import Link, Naming, Shape

_SLOT = re.compile(r"\{(\w)\}|(\d+)")
_NUMBER = re.compile(r"\d+|\[[0-9,-]+\]")  # a number, or a range of them in a packed name (`inweave.targets.compact`)
_EQUAL = re.compile(r"(in:)?(\d)/(\d)")


@dataclass(frozen=True, slots=True)
class Template:
    """A name with numbered slots: a '#'-form for look-up and the constraint on each number."""

    form: str
    slots: tuple[str, ...]  # "{i}" for a variable, else the literal digits
    pieces: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> Template:
        slots = tuple(f"{{{var}}}" if var else digits for var, digits in _SLOT.findall(text))
        pieces = tuple(_SLOT.sub("#", text).split("#"))
        return Template("#".join(pieces), slots, pieces)

    def match(self, numbers: tuple[str, ...]) -> dict[str, str] | None:
        variables: dict[str, str] = {}
        for slot, number in zip(self.slots, numbers, strict=True):
            if slot[0] == "{":
                if variables.setdefault(slot, number) != number:
                    return None
            elif slot != number:
                return None
        return variables

    def fill(self, variables: Mapping[str, str]) -> str:
        numbers = [variables.get(slot, slot) for slot in self.slots] + [""]
        return "".join(piece + slot for piece, slot in zip(self.pieces, numbers, strict=True))


@dataclass(frozen=True, slots=True)
class NameRule:
    part: Template
    original: Template
    layout: str = ""  # "", "qkv", "qkvm", or the number of equal parts
    index: int = 0
    swap: bool = False
    swap_last: bool = False
    transpose: bool = False
    last: bool = False
    flat_rows: int = 0
    pieces: int = 0  # the number of originals in the diffusers tensor; ``index`` is this one's position


Lookup = dict[str, list[tuple[Template, NameRule]]]


class RuleTable:
    """A table, read and parsed when first needed; ``alias_text`` lines are `alias-module  original-module  [number of
    parts]`.
    """

    def __init__(self, name: str, text: Callable[[], str], alias_text: Callable[[], str] = str) -> None:
        self.name = name
        self._read, self._read_aliases = text, alias_text

    @cached_property
    def _text(self) -> str:
        return self._read()

    @cached_property
    def _alias_text(self) -> str:
        return self._read_aliases()

    @cached_property
    def _rules(self) -> tuple[Lookup, Lookup]:
        """The rules by the parts' names and by the originals'."""
        by_part: Lookup = {}
        by_original: Lookup = {}
        for rule in (rule for line in self._text.splitlines() for rule in _parse(line)):
            by_part.setdefault(rule.part.form, []).append((rule.part, rule))
            by_original.setdefault(rule.original.form, []).append((rule.original, rule))
        return by_part, by_original

    @property
    def divides(self) -> bool:
        return " in:" in self._text

    def links(self, shapes: Mapping[str, Shape], naming: Naming) -> list[Link]:
        last = _last_block(shapes)
        if naming == "original":
            return [link for name in shapes for link in self._from_original(name, shapes, last)]
        by_part = self._rules[0]
        fused: dict[str, list[tuple[NameRule, str, dict[str, str]]]] = {}
        links: list[Link] = []
        for name in shapes:
            matches = _find(by_part, name, last)
            if not matches:
                fused.setdefault(name, []).append((_SAME, name, {}))
                continue
            if matches[0][0].pieces:
                links += [_piece(rule, name, rule.original.fill(v), _share(shapes[name], rule)) for rule, v in matches]
                continue
            rule, variables = matches[0]
            fused.setdefault(rule.original.fill(variables), []).append((rule, name, variables))
        return links + [link for original, uses in fused.items() for link in _stack(original, uses, shapes, last)]

    def _from_original(self, name: str, shapes: Mapping[str, Shape], last: str) -> list[Link]:
        matches = _find(self._rules[1], name, last)
        shape = shapes[name]
        if not matches:
            return [Link(name, shape, name)]
        rule, variables = matches[0]
        part = rule.part.fill(variables)
        if rule.pieces:
            return [_piece(rule, part, name, shape)]
        if not rule.layout:
            if rule.transpose:
                shape = shape[::-1]
            elif rule.flat_rows and len(shape) == 1:
                shape = (rule.flat_rows, shape[0] // rule.flat_rows)
            swap = _swaps(rule, variables, last)
            return [Link(part, shape, name, 0, None, swap, rule.transpose, bool(rule.flat_rows))]
        sizes = _part_sizes(rule.layout, shape[0], _width(name, shapes, rule, variables))
        links, start = [], 0
        for (rule, variables), size in zip(sorted(matches, key=lambda use: use[0].index), sizes, strict=False):
            links.append(Link(rule.part.fill(variables), (size, *shape[1:]), name, start, size))
            start += size
        return links

    def coverage(self, names: Iterable[str]) -> dict[Naming, int]:
        by_part, by_original = self._rules
        names = list(names)
        return {
            "diffusers": sum(1 for name in names if _find(by_part, name)),
            "original": sum(1 for name in names if _find(by_original, name)),
        }

    def module_forms(self) -> set[str]:
        """Return flat module names of both namings and the aliases, with '#' for numbers, without parsing the rules."""
        names = {name.removeprefix("=") for line in self._text.splitlines() for name in line.split()[:2]}
        names |= {name for line in self._alias_text.splitlines() for name in line.split()[:1]}
        forms = {re.sub(r"\.(weight|bias|scale)$", "", _SLOT.sub("#", name)).replace(".", "_") for name in names}
        return forms | {f"{form}_#" for form in forms if form.endswith(("qkv", "linear1"))}

    def aliases(self, links: list[Link]) -> dict[str, tuple[str, ...]]:
        modules: dict[str, list[Link]] = {}
        for link in links:
            if link.part.endswith(".weight"):
                modules.setdefault(link.original.removesuffix(".weight"), []).append(link)
        aliases: dict[str, tuple[str, ...]] = {}
        for line in self._alias_text.splitlines():
            words = line.split()
            if not words:
                continue
            alias, original = Template.parse(words[0]), Template.parse(words[1])
            count = int(words[2]) if len(words) > 2 else None
            for module, group in modules.items():
                numbers = tuple(_NUMBER.findall(module))
                if _NUMBER.sub("#", module) != original.form or len(numbers) != len(original.slots):
                    continue
                variables = original.match(numbers)
                if variables is not None:
                    parts = sorted(group, key=lambda link: link.start)[:count]
                    aliases[alias.fill(variables)] = tuple(link.part.removesuffix(".weight") for link in parts)
        return aliases


def _parse(line: str) -> list[NameRule]:
    words = line.split()
    if not words:
        return []
    part = words[0]
    original = words[1] if len(words) > 1 else part
    flags = set(words[2:])
    layout, number, pieces, rows = "", 0, 0, 0
    for flag in flags:
        if match := _EQUAL.fullmatch(flag):
            number = int(match[2]) - 1
            pieces, layout = (int(match[3]), "") if match[1] else (0, match[3])
        elif flag.startswith("rows:"):
            rows = int(flag[5:])
        elif ":" in flag:
            layout, _, index = flag.partition(":")
            number = int(index)
    pairs = (
        [(part[1:], original.removeprefix("="))]
        if part.startswith("=")
        else [(f"{part}.{param}", f"{original}.{param}") for param in ("weight", "bias")]
    )
    return [
        NameRule(
            Template.parse(a),
            Template.parse(b),
            layout,
            number,
            "swap" in flags,
            "swap-last" in flags,
            "transpose" in flags,
            "last" in flags,
            rows,
            pieces,
        )
        for a, b in pairs
    ]


_MAIN_STACK = re.compile(r"(?:transformer_blocks|joint_blocks|blocks)\.(\d+)\.")
_SAME = NameRule(Template("", (), ("",)), Template("", (), ("",)))


def _find(rules: Lookup, name: str, last: str | None = None) -> list[tuple[NameRule, dict[str, str]]]:
    """Return the rules for a tensor; those of the last block only if it is the ``last`` one, or may be (None)."""
    form, numbers = _form(name)
    candidates = rules.get(form)
    if not candidates:
        return []
    matches = ((rule, template.match(numbers)) for template, rule in candidates)
    return [
        (rule, variables)
        for rule, variables in matches
        if variables is not None and (not rule.last or last is None or variables.get("{i}") == last)
    ]


@lru_cache(maxsize=1 << 14)
def _form(name: str) -> tuple[str, tuple[str, ...]]:
    """Return a name with '#' for every number, and the numbers; cached, because many tables ask for the same names."""
    return _NUMBER.sub("#", name), tuple(_NUMBER.findall(name))


def _piece(rule: NameRule, tensor: str, original: str, shape: Shape) -> Link:
    """Return the link of an original that is some rows of a diffusers tensor, named like a part of a fused module."""
    module, _, param = tensor.rpartition(".")
    rows = shape[0]
    return Link(f"{module}.{rule.index}.{param}", shape, original, tensor=tensor, offset=rule.index * rows)


def _share(shape: Shape, rule: NameRule) -> Shape:
    return (shape[0] // rule.pieces, *shape[1:])


def _stack(
    original: str, uses: list[tuple[NameRule, str, dict[str, str]]], shapes: Mapping[str, Shape], last: str
) -> list[Link]:
    uses = sorted(uses, key=lambda use: use[0].index)
    if not uses[0][0].layout:
        return [
            Link(
                name,
                shapes[name],
                original,
                0,
                None,
                _swaps(rule, variables, last),
                rule.transpose,
                bool(rule.flat_rows),
            )
            for rule, name, variables in uses
        ]
    links, start = [], 0
    for _, name, _ in uses:
        size = shapes[name][0]
        links.append(Link(name, shapes[name], original, start, size))
        start += size
    return links


def _swaps(rule: NameRule, variables: Mapping[str, str], last: str) -> bool:
    return rule.swap or (rule.swap_last and variables.get("{i}") == last)


def _last_block(shapes: Mapping[str, Shape]) -> str:
    """Return the highest block number of the main stack."""
    numbers = [int(m[1]) for name in shapes if (m := _MAIN_STACK.match(name))]
    return str(max(numbers, default=-1))


def _width(name: str, shapes: Mapping[str, Shape], rule: NameRule, variables: Mapping[str, str]) -> int:
    """Return the fused weight's input width; a bias asks the weight next to it."""
    shape = shapes[name]
    if len(shape) > 1:
        return shape[1]
    weight = shapes.get(re.sub(r"bias$", "weight", name), ())
    return weight[1] if len(weight) > 1 else shape[0] // (3 if rule.layout == "qkv" else 7)


def _part_sizes(layout: str, out: int, width: int) -> list[int]:
    if layout.isdigit():
        return [out // int(layout)] * int(layout)
    if layout == "qkv":
        rest = (out - width) // 2
        return [width, rest, rest]
    return [width, width, width, out - 3 * width]
