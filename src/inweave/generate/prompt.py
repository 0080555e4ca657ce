"""The grammar of prompts, as people write them for the common front ends.

    (word)  (word:1.2)  [word]       weights: times 1.1, times 1.2, divided by 1.1; they nest and multiply
    \\( \\) \\[ \\]                      the characters themselves
    BREAK                            what follows starts a new chunk of text
    <lora:name:0.8>                  an adapter and its strength (`inweave.adapter.strength_spec`); `lyco` means the same

A tag of another kind is not text either: it is removed and reported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from inweave.adapter.strength_spec import parse_strength_spec
from inweave.errors import ConfigError

BREAK = "BREAK"
_TAG = re.compile(r"<(\w+):([^<>]+)>")
_TOKEN = re.compile(
    r"\\[()\[\]\\]|[()\[\]]|:\s*[+-]?(?:\d+\.?\d*|\.\d+)\s*\)|\bBREAK\b|\\|[^\\()\[\]:B]+|:|B", re.DOTALL
)
UP, DOWN = 1.1, 1 / 1.1


@dataclass(frozen=True, slots=True)
class LoraTag:
    """A LoRA named inside a prompt."""

    name: str
    te: float
    unet: float


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """``text`` is the prompt without tags; ``pieces`` its weighted parts, for the text encoders."""

    text: str
    pieces: tuple[tuple[str, float], ...]
    tags: tuple[LoraTag, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


@lru_cache(maxsize=64)
def parse(prompt: str) -> ParsedPrompt:
    """Split a prompt into weighted text and LoRA tags."""
    tags: list[LoraTag] = []
    problems: list[str] = []
    warnings: list[str] = []

    def take(match: re.Match[str]) -> str:
        kind, content = match[1].lower(), match[2]
        if kind not in ("lora", "lyco"):
            warnings.append(f"the tag {match[0]} is unknown and was ignored; use <lora:name:strength>")
            return ""
        try:
            spec = parse_strength_spec(content, tag=True)
        except ConfigError as error:
            problems.append(f"prompt: {match[0]}: {error}; write <lora:name:0.8> or <lora:name:te:unet>")
            return ""
        te = spec.components.get("te", 1.0 if spec.overall is None else spec.overall)
        tags.append(LoraTag(spec.name, te, spec.components.get("unet", te)))
        return ""

    text = _TAG.sub(take, prompt)
    text = re.sub(r"[ \t]{2,}", " ", text).strip() if text != prompt else text.strip()
    return ParsedPrompt(text, tuple(weighted_pieces(text)), tuple(tags), tuple(problems), tuple(warnings))


def weighted_pieces(text: str) -> list[tuple[str, float]]:
    """Pieces of text with their weights; brackets that never close count as if they did, at the end."""
    pieces: list[list[object]] = []  # [text, weight]
    brackets: list[tuple[str, int]] = []  # which bracket, and the first piece inside it

    def scale(start: int, factor: float) -> None:
        for piece in pieces[start:]:
            piece[1] = float(piece[1]) * factor  # type: ignore[arg-type]

    for token in _TOKEN.findall(text):
        if token in ("(", "["):
            brackets.append((token, len(pieces)))
        elif token == ")" and _is_open(brackets, "("):
            scale(_close(brackets, "("), UP)
        elif token == "]" and _is_open(brackets, "["):
            scale(_close(brackets, "["), DOWN)
        elif token.startswith(":") and token.endswith(")") and _is_open(brackets, "("):
            scale(_close(brackets, "("), float(token[1:-1]))
        elif token == BREAK:
            pieces.append([BREAK, 1.0])
        else:
            pieces.append([token[1:] if len(token) == 2 and token[0] == "\\" else token, 1.0])
    for bracket, start in reversed(brackets):
        scale(start, UP if bracket == "(" else DOWN)
    merged: list[tuple[str, float]] = []
    for piece, weight in pieces:
        words, number = str(piece), 1.0 if piece == BREAK else float(weight)  # type: ignore[arg-type]
        if merged and BREAK not in (words, merged[-1][0]) and merged[-1][1] == number:
            merged[-1] = (merged[-1][0] + words, number)
        else:
            merged.append((words, number))
    return [(words if words == BREAK else words.strip(), number) for words, number in merged if words.strip()]


def _is_open(brackets: list[tuple[str, int]], bracket: str) -> bool:
    return any(kind == bracket for kind, _ in brackets)


def _close(brackets: list[tuple[str, int]], bracket: str) -> int:
    """Remove the innermost bracket of this kind; returns where it began."""
    for depth in range(len(brackets) - 1, -1, -1):
        if brackets[depth][0] == bracket:
            return brackets.pop(depth)[1]
    raise AssertionError("no such bracket is open")
