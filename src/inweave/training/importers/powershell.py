"""Statements and conditions of PowerShell, for `shell_script`, one per line. Nothing is run.

if ($a)         ┐      if ($a) {          blocks open and close at the end of a line, wherever they do in the script,
{ x; y }        │ ──►  x                  and a list is one line
elseif ($b) {z} ┘      y
                       } elseif ($b) {
                       z
                       }

condition   -and, -or, -not and ! of comparisons: -eq, -ne, -like, -notlike, -in, -notin, -contains, -gt, -ge, -lt and
            -le, with i or c before the name; a value alone is true unless it is empty, 0 or $false
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import pairwise

#: the value of an expression; None if it is not known
Value = Callable[[str], str | None]

_ASSIGNMENT = re.compile(r"^\s*(?:\[[\w.]+\]\s*)?\$(?:env:)?\w+\s*\+?=", re.MULTILINE)
_COMPARISON = re.compile(
    r"^(.+?)\s+-[ic]?(eq|ne|like|notlike|in|notin|contains|notcontains|gt|ge|lt|le)\s+(.+)$", re.IGNORECASE | re.DOTALL
)
_NOT = re.compile(r"^(?:!|-not\b)\s*", re.IGNORECASE)
_HEADER = re.compile(r"\s*(?:if|elseif|else|foreach|while|for|switch)\b", re.IGNORECASE)
_TOKEN = re.compile(r"""`[\s\S]|"(?:`[\s\S]|[^"`])*"|'[^']*'|<#[\s\S]*?#>|(?<!\S)#[^\n]*|\$\{[^}]*\}|[@$]\(|[\s\S]""")


def is_powershell(text: str) -> bool:
    """Return whether a script assigns variables as PowerShell does."""
    return bool(_ASSIGNMENT.search(text))


def powershell_statements(text: str) -> Iterator[str]:
    """Yield the statements of a script, and the lines that open and close blocks."""
    pieces = [*_pieces(text), ""]
    joined = False  # the closing line of a block was part of the line before
    for piece, after in pairwise(pieces):
        if joined:
            joined = False
        elif piece == "}" and re.match(r"else.*\{$", after, re.IGNORECASE | re.DOTALL):
            joined = True
            yield f"}} {after}"
        else:
            yield piece


def _pieces(text: str) -> Iterator[str]:
    """Yield statements, headers of blocks with their bracket, and closing brackets."""
    current, depth = "", 0
    for token in _TOKEN.findall(text):
        if token.startswith(("#", "<#")):
            continue
        if token[0] == "`" and token[1:2] in ("\r", "\n"):
            current += " "
        elif token in ("(", "@(", "$(", ")"):
            depth, current = max(0, depth + (-1 if token == ")" else 1)), current + token
        elif token in "\r\n" and depth:
            ends = current.rstrip()[-1:]
            current += ", " if "@(" in current and ends not in (",", "(", "") else " "
        elif token == "{" and not depth:
            yield current.strip() + " {"
            current = ""
        elif token in "}\r\n;" and not depth:
            if token in "\r\n" and _HEADER.match(current):
                current += " "  # its bracket is on the next line
                continue
            if current.strip():
                yield re.sub(r",\s*\)$", ")", current.strip())
            current = ""
            if token == "}":
                yield "}"
        else:
            current += token
    if current.strip():
        yield current.strip()


def condition_holds(text: str, value: Value) -> bool | None:
    """Return whether a condition holds; None if it depends on something that is not known."""
    text = _unwrapped(text)
    for word, decisive in (("or", True), ("and", False)):
        parts = _split(text, rf"-{word}\b")
        if len(parts) > 1:
            results = [condition_holds(part, value) for part in parts]
            return decisive if decisive in results else None if None in results else not decisive
    if match := _NOT.match(text):
        inner = condition_holds(text[match.end() :], value)
        return None if inner is None else not inner
    if match := _COMPARISON.match(text):
        return _compared(match[2].lower(), match[1], match[3], value)
    single = value(text)
    return None if single is None else single.lower() not in ("", "0", "0.0", "$false", "false", "$null")


def _compared(operator: str, left: str, right: str, value: Value) -> bool | None:
    if operator in ("contains", "notcontains"):
        operator, left, right = operator.replace("contains", "in"), right, left
    negated = operator == "ne" or operator.startswith("not")
    operator = operator.removeprefix("not")
    first = value(left)
    listed = _split(_unwrapped(right.strip().removeprefix("@")), ",") if operator == "in" else [right]
    others = [value(each) for each in listed]
    if first is None or None in others:
        return None
    known = [("" if each.lower() == "$null" else each).lower() for each in others if each is not None]
    first = ("" if first.lower() == "$null" else first).lower()
    if operator in ("gt", "ge", "lt", "le"):
        try:
            a, b = float(first or 0), float(known[0] or 0)
        except ValueError:
            return None
        return {"gt": a > b, "ge": a >= b, "lt": a < b, "le": a <= b}[operator]
    alike = any(fnmatchcase(first, each) if operator == "like" else _same(first, each) for each in known)
    return alike is not negated


def _same(first: str, second: str) -> bool:
    try:
        return float(first) == float(second)
    except ValueError:
        truth = {"true": "$true", "false": "$false"}
        return truth.get(first, first) == truth.get(second, second)


def _unwrapped(text: str) -> str:
    """Return a condition without the brackets around all of it."""
    text = text.strip()
    while text.startswith("(") and text.endswith(")") and len(_split(text[1:-1], r"\)\s*[^\s)]")) == 1:
        text = text[1:-1].strip()
    return text


def _split(text: str, separator: str) -> list[str]:
    """Return the parts between separators that are outside of quotes and brackets."""
    parts, start, depth, place = [], 0, 0, 0
    pattern = re.compile(separator, re.IGNORECASE)
    while place < len(text):
        quoted = re.compile(r"\"[^\"]*\"|'[^']*'").match(text, place)
        match = pattern.match(text, place) if depth == 0 else None
        if quoted:
            place = quoted.end()
        elif match:
            parts.append(text[start:place].strip())
            place = start = match.end()
        else:
            depth += {"(": 1, ")": -1}.get(text[place], 0)
            place += 1
    return [*parts, text[start:].strip()]
