"""The compositions that are drawn, and their captions: "a blue cat face", "two rockets", "pizza and beer mug".

A scene is a kind (see `compose.arrange`), one or two emoji, a color for each and a background; its caption names
all of it. The combinations of the test prompts are never drawn, so that they show how the model generalizes.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

import torch
from tools.embedded.captions import Emoji, plural, random_caption, with_article
from tools.embedded.compose import (
    BACKGROUNDS,
    COLORS,
    arrange,
    background_colors,
    over,
    recolor_some,
)
from tools.embedded.sprites import Sprites

KINDS = {"full": 52, "small": 10, "pair": 16, "stack": 8, "two": 5, "three": 4, "four": 5}
DOUBLE = ("pair", "stack")
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
    """Indices into a sprite set, color names and a background name (None: unchanged, white)."""

    kind: str
    first: int
    second: int
    color: str | None = None
    other_color: str | None = None
    background: str | None = None

    def held_out(self, emojis: list[Emoji]) -> bool:
        """Return whether this is one of the combinations kept for testing, or not a scene."""
        one, two = emojis[self.first].name, emojis[self.second].name
        double = self.kind in DOUBLE
        return (
            (self.color, one) in HELD_OUT_COLORS
            or (one, self.background) in HELD_BACKGROUNDS
            or (double and (self.other_color, two) in HELD_OUT_COLORS)
            or (double and frozenset((one, two)) in HELD_PAIRS)
            or (double and self.first == self.second)
        )

    def caption(self, emojis: list[Emoji], rng: random.Random) -> str:
        one = f"{self.color or ''} {emojis[self.first].name}".strip()
        two = f"{self.other_color or ''} {emojis[self.second].name}".strip()
        if self.kind == "full":
            text = random_caption(emojis[self.first], rng, self.color or "")
        elif self.kind == "small":
            size = rng.choice(["small", "small", "tiny"])
            text = random_caption(emojis[self.first], rng, f"{size} {self.color or ''}".strip())
        elif self.kind == "pair":
            joined = f"{one} and {two}"
            with_articles = f"{with_article(one)} and {with_article(two)}"
            sides = [f"{one} next to {two}", f"{one} left of {two}", f"{two} right of {one}"]
            text = rng.choice([joined, joined, with_articles, *sides])
        elif self.kind == "stack":
            text = rng.choice([f"{one} above {two}", f"{one} on top of {two}", f"{two} below {one}"])
        else:
            text = f"{self.kind} {plural(one) if rng.random() < 0.7 else one}"
        if self.background is None:
            return text
        ground = f" on {with_article(self.background)} background"
        others = [f", {self.background} background", f" with {with_article(self.background)} background"]
        return text + rng.choice([ground, ground, *others])


class Drawer:
    """Draws random emoji by weight, and scenes of them."""

    def __init__(self, emojis: list[Emoji], rng: random.Random) -> None:
        self.emojis, self.rng = emojis, rng
        # people are a third of all emoji and hard to compose: fewer of them
        self._sums = list(accumulate(emoji.weight * (0.4 if emoji.group == "person" else 1.0) for emoji in emojis))
        self.colorless = [not set(re.findall(r"[a-z]+", emoji.name)) & _COLOR_WORDS for emoji in emojis]

    def emoji(self) -> int:
        return min(bisect_left(self._sums, self.rng.random() * self._sums[-1]), len(self.emojis) - 1)

    def scene(self, kind: str) -> Scene:
        """Draw one scene that is neither held out nor the plain image."""
        while True:
            scene = self._any_scene(kind)
            plain = kind == "full" and scene.color is None and scene.background is None
            if not plain and not scene.held_out(self.emojis):
                return scene

    def _any_scene(self, kind: str) -> Scene:
        rng, first, second = self.rng, self.emoji(), self.emoji()
        color = rng.choice(list(COLORS)) if rng.random() < (0.6 if kind == "full" else 0.2) else None
        other = rng.choice(list(COLORS)) if kind in DOUBLE and rng.random() < 0.2 else None
        color = color if self.colorless[first] else None
        other = other if self.colorless[second] else None
        needed = kind == "full" and color is None
        background = rng.choice(list(BACKGROUNDS)) if needed or rng.random() < 0.3 else None
        return Scene(kind, first, second, color, other, background if background != color else None)


def draw_scenes(sprites: Sprites, scenes: list[Scene], rng: random.Random) -> torch.Tensor:
    """Draw ``scenes`` of one kind as images in [-1, 1]."""
    first = sprites.images[[scene.first for scene in scenes]].float()
    second = sprites.images[[scene.second for scene in scenes]].float()
    first = recolor_some(first, [scene.color for scene in scenes])
    second = recolor_some(second, [scene.other_color for scene in scenes])
    grounds = background_colors([scene.background for scene in scenes], first.device)
    return over(arrange(scenes[0].kind, first, second, rng), grounds)
