"""The compositions that are drawn, and their captions: "a blue cat face", "two rockets, ink", "pizza and beer mug".

A scene is a kind (see `compose.arrange`), one or two sprites of one set, a color for each, a background and a style;
its caption names all of it, but the set only sometimes: without a word for it, how a subject is drawn is the seed's
choice. The combinations of the test prompts are never drawn, so that they show how the model generalizes.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import torch
from tools.embedded.captions import plural, random_caption, with_article
from tools.embedded.compose import BACKGROUNDS, COLORS, PATTERNS, arrange, grounds, over, recolor_some
from tools.embedded.library import Library
from tools.embedded.variations import FILTERS, SET_WORDS, STYLES, moved

KINDS = {
    "full": 60, "small": 6, "pair": 13, "stack": 6, "front": 3, "two": 4, "three": 3, "four": 3, "five": 1, "six": 1,
}  # fmt: skip
DOUBLE = ("pair", "stack", "front")
SET_WORD_SHARE = 0.3
STYLE_SHARE = 0.16
STYLE_WORD_SHARE = 0.95
_COLOR_WORDS = {*COLORS, "black", "white", "golden", "gold", "silver", "dark", "light", "medium", "rainbow", "grey"}

HELD_OUT_COLORS = {
    ("blue", "cat face"), ("purple", "pizza"), ("green", "rocket"), ("pink", "elephant"), ("red", "frog"),
    ("teal", "fox"), ("blue", "octopus"), ("green", "dog face"),
}  # fmt: skip
HELD_PAIRS = {
    frozenset(pair)
    for pair in (
        ("cat face", "dog face"), ("pizza", "beer mug"), ("red apple", "banana"), ("robot", "ghost"),
        ("rocket", "full moon"), ("octopus", "crown"),
    )
}  # fmt: skip
HELD_BACKGROUNDS = {
    ("red apple", "blue"), ("ghost", "black"), ("star", "purple"), ("rocket", "pink"), ("robot", "yellow"),
    ("octopus", "yellow"),
}  # fmt: skip

#: names, and below them combinations that training leaves out
PROMPTS = (
    "red apple", "cat face", "dog face", "pizza", "rocket", "automobile",
    "grinning face", "smiling face with sunglasses", "ghost", "robot", "octopus", "birthday cake",
    "a guitar emoji", "house", "an emoji of a butterfly", "snowman", "crown", "frog",
    "a blue cat face", "a purple pizza", "a green rocket", "a pink elephant", "a red frog", "a teal fox",
    "red apple on a blue background", "ghost on a black background", "star on a purple background",
    "rocket on a pink background", "a small robot on a yellow background", "a blue octopus on a yellow background",
    "cat face and dog face", "pizza and beer mug", "red apple above banana", "two rockets", "four butterflies",
    "robot next to ghost",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scene:
    """Rows of a library, color names, a background (None: unchanged, white), and a style (None: as it was drawn)."""

    kind: str
    first: int
    second: int
    color: str | None = None
    other_color: str | None = None
    background: str | None = None
    pattern: str | None = None
    style: str | None = None

    def held_out(self, library: Library) -> bool:
        """Return whether this is one of the combinations kept for testing, or not a scene."""
        one, two = library.name(self.first), library.name(self.second)
        double = self.kind in DOUBLE
        return (
            (self.color, one) in HELD_OUT_COLORS
            or (one, self.background) in HELD_BACKGROUNDS
            or (double and (self.other_color, two) in HELD_OUT_COLORS)
            or (double and frozenset((one, two)) in HELD_PAIRS)
            or (double and one == two)
        )

    def caption(self, library: Library, rng: random.Random) -> str:
        text = self._subject(library, rng)
        if self.background is not None:
            ground = f"{self.pattern or ''} {self.background}".strip()
            with_article_ = f" on {with_article(ground)} background"
            others = [f", {ground} background", f" with {with_article(ground)} background"]
            text += rng.choice([with_article_, with_article_, *others])
        if self.style is not None:
            return in_style(text, STYLES[self.style], rng) if rng.random() < STYLE_WORD_SHARE else text
        return in_style(text, SET_WORDS[library.sets[self.first]], rng) if rng.random() < SET_WORD_SHARE else text

    def _subject(self, library: Library, rng: random.Random) -> str:
        one = f"{self.color or ''} {library.name(self.first)}".strip()
        two = f"{self.other_color or ''} {library.name(self.second)}".strip()
        if self.kind == "full":
            return random_caption(library.emojis[self.first], rng, self.color or "")
        if self.kind == "small":
            size = rng.choice(["small", "small", "tiny"])
            return random_caption(library.emojis[self.first], rng, f"{size} {self.color or ''}".strip())
        if self.kind == "pair":
            joined = f"{one} and {two}"
            with_articles = f"{with_article(one)} and {with_article(two)}"
            sides = [f"{one} next to {two}", f"{one} left of {two}", f"{two} right of {one}"]
            return rng.choice([joined, joined, with_articles, *sides])
        if self.kind == "stack":
            return rng.choice([f"{one} above {two}", f"{one} on top of {two}", f"{two} below {one}"])
        if self.kind == "front":
            return rng.choice([f"{one} in front of {two}", f"{two} behind {one}"])
        return f"{self.kind} {plural(one) if rng.random() < 0.7 else one}"


def in_style(text: str, words: tuple[str, ...], rng: random.Random) -> str:
    """Return a caption with the words of a style: "rocket, ink", "ink rocket", "rocket in ink style"."""
    word = rng.choice(words)
    ending = f"{text} in {word}" if word.endswith("style") else f"{text} in {word} style"
    return rng.choice(
        [f"{text}, {word}", f"{text}, {word}", ending] + ([f"{word} {text}"] * 2 if "," not in text else [])
    )


class Drawer:
    """Draws random scenes: a subject by weight, then one of the sets that draw it."""

    def __init__(self, library: Library, rng: random.Random) -> None:
        self.library, self.rng = library, rng
        self.colorless = [not set(re.findall(r"[a-z]+", emoji.name)) & _COLOR_WORDS for emoji in library.emojis]

    def kind(self) -> str:
        return self.rng.choices(list(KINDS), weights=list(KINDS.values()))[0]

    def scene(self, kind: str) -> Scene:
        """Draw a scene that is not held out; more than half of the single ones are nothing but the drawing."""
        while True:
            scene = self._any_scene(kind)
            if not scene.held_out(self.library):
                return scene

    def _any_scene(self, kind: str) -> Scene:
        rng, library = self.rng, self.library
        first = library.row(rng)
        second = library.row(rng, library.sets[first])
        color = rng.choice(list(COLORS)) if rng.random() < (0.22 if kind == "full" else 0.2) else None
        other = rng.choice(list(COLORS)) if kind in DOUBLE and rng.random() < 0.2 else None
        color = color if self.colorless[first] else None
        other = other if self.colorless[second] else None
        background = rng.choice(list(BACKGROUNDS)) if rng.random() < 0.2 else None
        background = background if background != color else None
        pattern = rng.choice(PATTERNS) if background and rng.random() < 0.2 else None
        style = rng.choice(list(FILTERS)) if rng.random() < STYLE_SHARE else None
        if (
            style in ("silhouette", "gray", "outline") or library.sets[first] == "ink"
        ):  # no color of the subject is left
            color = other = None
        return Scene(kind, first, second, color, other, background, pattern, style)


def draw_scenes(
    library: Library, scenes: list[Scene], rng: random.Random, draw: torch.Generator, *, still: bool = False
) -> torch.Tensor:
    """Draw ``scenes`` of one kind as images in [-1, 1]; ``still``: single ones exactly where their set has them."""
    kind, device = scenes[0].kind, library.images.device
    first = library.images[[scene.first for scene in scenes]].float()
    first = recolor_some(first, [scene.color for scene in scenes])
    if kind == "full":
        sprites = first if still else moved(first, draw)
    else:
        second = library.images[[scene.second for scene in scenes]].float()
        sprites = arrange(kind, first, recolor_some(second, [scene.other_color for scene in scenes]), rng)
    for style in sorted({scene.style for scene in scenes if scene.style}):
        rows = [i for i, scene in enumerate(scenes) if scene.style == style]
        sprites[rows] = FILTERS[style](sprites[rows], draw)
    names, patterns = [scene.background for scene in scenes], [scene.pattern for scene in scenes]
    return over(sprites, grounds(names, patterns, sprites.shape[-1], device)).clamp(-1, 1)
