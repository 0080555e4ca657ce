"""The grammar of prompts, as people write them for the common front ends.

    (word)  (word:1.2)  [word]       weights: times 1.1, times 1.2, divided by 1.1; they nest and multiply
    \\( \\) \\[ \\]                      the characters themselves; before any other a backslash is dropped
    BREAK                            what follows starts a new chunk of text
    <lora:name:0.8>                  an adapter and its strength (`inweave.adapter.strength_spec`); or `lyco`
    [a:b:0.5]  [a|b]  a AND b        prompts that change between steps or are composed (`inweave.generate.prompt_edits`)

Random choices and wildcards (`inweave.generate.wildcards`) are made before, and `embedding:name` is plain text, which a
warning says.

A tag of another kind is not text either: it is removed and reported. A prompt may be empty. It has at most `MAX_LENGTH`
characters, and no weight is beyond `MAX_WEIGHT`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from inweave.adapter.strength_spec import parse_strength_spec
from inweave.errors import ConfigError, Problem
from inweave.generate.prompt_edits import Composition, compose

Pieces = tuple[tuple[str, float], ...]
MAX_LENGTH = 50_000
MAX_WEIGHT = 10_000.0  # far beyond any use; half precision ends at 65,504
BREAK = "BREAK"
_TAG = re.compile(r"<(\w+):([^<>]+)>")
_TOKEN = re.compile(
    r"\\[()\[\]\\]|[()\[\]]|:\s*+[+-]?(?:\d++\.?\d*+|\.\d++)\s*+\)|\bBREAK\b|\\|[^\\()\[\]:B]+|:|B", re.DOTALL
)
_MARK = "\0"  # the position of a removed tag
UP, DOWN = 1.1, 1 / 1.1
#: processors multiply denormals many times slower: every `_FLUSH` brackets, weights below `_TINY` become 0
_FLUSH, _TINY = 1000, 1e-200


@dataclass(frozen=True, slots=True)
class LoraTag:
    """A LoRA named inside a prompt."""

    name: str
    te: float
    unet: float


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """``text`` is the prompt without tags; ``pieces`` its weighted parts, for the text encoders.

    ``composition``: what it says at each step, where it is not one text that stays the same; ``pieces`` then hold all
    of it.
    """

    text: str
    pieces: Pieces
    tags: tuple[LoraTag, ...]
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    composition: Composition | None = None

    @property
    def composed(self) -> bool:
        """Whether predictions for several texts have to be added up."""
        return self.composition is not None and self.composition.composed

    def at(self, step: int, steps: int) -> tuple[tuple[Pieces, float], ...]:
        """Return the texts of one step, counted from 0, and the weight of each in the prediction."""
        if self.composition is None:
            return ((self.pieces, 1.0),)
        parts = self.composition.parts
        return tuple((tuple(weighted_pieces(part.at(step, steps))), part.weight) for part in parts)


def parse(prompt: str, negative: bool = False) -> ParsedPrompt:
    """Split a prompt into weighted text and LoRA tags; AND means nothing in a ``negative`` one."""
    tags: list[LoraTag] = []
    problems: list[Problem] = []
    warnings: list[str] = []
    if len(prompt) > MAX_LENGTH:
        wrong = Problem("prompt", f"{len(prompt):,} characters; at most {MAX_LENGTH:,} are accepted")
        return ParsedPrompt(prompt, (), (), (wrong,), ())

    def take(match: re.Match[str]) -> str:
        kind, content = match[1].lower(), match[2]
        if kind not in ("lora", "lyco"):
            warnings.append(f"the tag {_short(match[0])} is unknown and was ignored; use <lora:name:strength>")
            return ""
        try:
            spec = parse_strength_spec(content, tag=True)
        except ConfigError as error:
            reason = _short(str(error), 300)
            advice = "write <lora:name:0.8> or <lora:name:te:unet>"
            problems.append(Problem("prompt", f"{_short(match[0])}: {reason}; {advice}"))
            return ""
        te = spec.components.get("te", 1.0 if spec.overall is None else spec.overall)
        tags.append(LoraTag(spec.name, te, spec.components.get("unet", te)))
        return ""

    text = _TAG.sub(take, prompt)
    text = re.sub(r"[ \t]{2,}", " ", text).strip() if text != prompt else text.strip()
    if not _is_text(text):
        problems.append(Problem("prompt", "it holds half a surrogate pair, which is not text"))
    composition = None
    try:
        composition = compose(text, negative=negative)
        warnings += composition.warnings
        if tags and _MARK in compose(_TAG.sub(_MARK, prompt), negative=negative).edited_text():
            warnings.append("a LoRA inside of [...] is applied in all steps; only words change between them")
    except ConfigError as error:
        problems += error.problems
    warnings += syntax_warnings(text)
    texts = [text] if composition is None else [part.everything() for part in composition.parts]
    pieces = [piece for each in texts for piece in weighted_pieces(each)]
    if composition is not None and composition.plain:
        composition = None
    elif composition is not None:
        if any(not abs(part.weight) <= MAX_WEIGHT for part in composition.parts):
            problems.append(Problem("prompt", f"AND gives a part a weight beyond {MAX_WEIGHT:,.0f}"))
    if any(not abs(weight) <= MAX_WEIGHT for _, weight in pieces):
        problems.append(Problem("prompt", f"its brackets give a word a weight beyond {MAX_WEIGHT:,.0f}"))
    return ParsedPrompt(text, tuple(pieces), tuple(tags), tuple(problems), tuple(warnings), composition)


def scaled_tags(prompt: str, factor: float) -> str:
    """Return the prompt with the strengths of its LoRA tags multiplied."""

    def scale(match: re.Match[str]) -> str:
        tags = parse(match[0]).tags
        return (
            "".join(f"<lora:{tag.name}:te={tag.te * factor!r}:unet={tag.unet * factor!r}>" for tag in tags) or match[0]
        )

    return _TAG.sub(scale, prompt)


def strip_tags(prompt: str) -> str:
    """Return the prompt without its LoRA tags; other tags stay, to be reported."""
    return _TAG.sub(lambda match: "" if parse(match[0]).tags else match[0], prompt)


def syntax_warnings(text: str) -> list[str]:
    """Return a line for each kind of syntax of other programs that inweave reads as plain text."""
    if "embedding:" in text:
        return ["embeddings (textual inversion) are not loaded, and their names are plain words"]
    return []


def weighted_pieces(text: str) -> list[tuple[str, float]]:
    """Return pieces of text with their weights; brackets that never close count as if they did, at the end."""
    tokens = _TOKEN.findall(text)
    words: list[str] = []
    weights = np.ones(len(tokens))
    opened: dict[str, list[tuple[int, int]]] = {"(": [], "[": []}  # position of the bracket, first piece inside it
    with np.errstate(over="ignore", invalid="ignore"):
        for position, token in enumerate(tokens):
            if token in opened:
                opened[token].append((position, len(words)))
            elif token == ")" and opened["("]:
                weights[opened["("].pop()[1] : len(words)] *= UP
            elif token == "]" and opened["["]:
                weights[opened["["].pop()[1] : len(words)] *= DOWN
            elif token[0] == ":" and token[-1] == ")" and opened["("]:
                weights[opened["("].pop()[1] : len(words)] *= float(token[1:-1])
            else:
                words.append(token.removeprefix("\\"))
        unclosed = [(*each, UP) for each in opened["("]] + [(*each, DOWN) for each in opened["["]]
        for count, (_, start, factor) in enumerate(sorted(unclosed, reverse=True), 1):
            weights[start : len(words)] *= factor
            if count % _FLUSH == 0:
                weights[np.abs(weights) < _TINY] = 0.0
    merged: list[tuple[list[str], float]] = []
    for word, weight in zip(words, weights.tolist(), strict=False):
        number = 1.0 if word == BREAK else weight
        if merged and BREAK not in (word, merged[-1][0][0]) and merged[-1][1] == number:
            merged[-1][0].append(word)
        else:
            merged.append(([word], number))
    joined = (("".join(parts), number) for parts, number in merged)
    return [(piece if piece == BREAK else piece.strip(), number) for piece, number in joined if piece.strip()]


def _is_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _short(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
