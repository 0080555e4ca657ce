"""The grammar of prompts, as people write them for the common front ends.

    (word)  (word:1.2)  [word]       weights: times 1.1, times 1.2, divided by 1.1; they nest and multiply
    \\( \\) \\[ \\]                      the characters themselves
    BREAK                            what follows starts a new chunk of text
    <lora:name:0.8>                  an adapter and its strength (`inweave.adapter.strength_spec`); `lyco` means the same

A tag of another kind is not text either: it is taken out and reported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from inweave.adapter.strength_spec import parse_strength_spec
from inweave.errors import ConfigError

BREAK = "BREAK"
_TAG = re.compile(r"<(\w+):([^<>]+)>")
_TOKEN = re.compile(
    r"\\[()\[\]\\]|[()\[\]]|:\s*[+-]?(?:\d+\.?\d*|\.\d+)\s*\)|\bBREAK\b|\\|[^\\()\[\]:B]+|:|B", re.DOTALL
)
UP, DOWN = 1.1, 1 / 1.1


@dataclass(frozen=True, slots=True)
class Tag:
    """A LoRA named inside a prompt."""

    name: str
    te: float
    unet: float


@dataclass(frozen=True, slots=True)
class Parsed:
    """``text`` is the prompt without tags; ``pieces`` its weighted parts, for the text encoders."""

    text: str
    pieces: tuple[tuple[str, float], ...]
    tags: tuple[Tag, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def parse(prompt: str) -> Parsed:
    """Split a prompt into weighted text and LoRA tags."""
    tags: list[Tag] = []
    problems: list[str] = []
    warnings: list[str] = []

    def take(match: re.Match[str]) -> str:
        kind, said = match[1].lower(), match[2]
        if kind not in ("lora", "lyco"):
            warnings.append(f"the tag {match[0]} is unknown and was left out; known are <lora:name:strength>")
            return ""
        try:
            spec = parse_strength_spec(said, tag=True)
        except ConfigError as error:
            problems.append(f"prompt: {match[0]}: {error}; write <lora:name:0.8> or <lora:name:te:unet>")
            return ""
        te = spec.components.get("te", 1.0 if spec.overall is None else spec.overall)
        tags.append(Tag(spec.name, te, spec.components.get("unet", te)))
        return ""

    text = _TAG.sub(take, prompt)
    text = re.sub(r"[ \t]{2,}", " ", text).strip() if text != prompt else text.strip()
    return Parsed(text, tuple(weights(text)), tuple(tags), tuple(problems), tuple(warnings))


def weights(text: str) -> list[tuple[str, float]]:
    """Pieces of text with their weights; brackets that never close count as if they did, at the end."""
    pieces: list[list[object]] = []  # [text, weight]
    opened: list[tuple[str, int]] = []  # which bracket, and the first piece inside it

    def scale(start: int, factor: float) -> None:
        for piece in pieces[start:]:
            piece[1] = float(piece[1]) * factor  # type: ignore[arg-type]

    for token in _TOKEN.findall(text):
        if token in ("(", "["):
            opened.append((token, len(pieces)))
        elif token == ")" and _innermost(opened, "("):
            scale(_close(opened, "("), UP)
        elif token == "]" and _innermost(opened, "["):
            scale(_close(opened, "["), DOWN)
        elif token.startswith(":") and token.endswith(")") and _innermost(opened, "("):
            scale(_close(opened, "("), float(token[1:-1]))
        elif token == BREAK:
            pieces.append([BREAK, 1.0])
        else:
            pieces.append([token[1:] if len(token) == 2 and token[0] == "\\" else token, 1.0])
    for bracket, start in reversed(opened):
        scale(start, UP if bracket == "(" else DOWN)
    merged: list[tuple[str, float]] = []
    for piece, weight in pieces:
        said, number = str(piece), 1.0 if piece == BREAK else float(weight)  # type: ignore[arg-type]
        if merged and BREAK not in (said, merged[-1][0]) and merged[-1][1] == number:
            merged[-1] = (merged[-1][0] + said, number)
        else:
            merged.append((said, number))
    return [(said if said == BREAK else said.strip(), number) for said, number in merged if said.strip()]


def _innermost(opened: list[tuple[str, int]], bracket: str) -> bool:
    return any(kind == bracket for kind, _ in opened)


def _close(opened: list[tuple[str, int]], bracket: str) -> int:
    """Forget the innermost bracket of this kind and say where it began."""
    for place in range(len(opened) - 1, -1, -1):
        if opened[place][0] == bracket:
            return opened.pop(place)[1]
    raise AssertionError("no such bracket is open")
