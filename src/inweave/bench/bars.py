"""The bars of the embedded model: what its images must reach, each measured by the judge and by plain arithmetic.

    subjects   share of captions whose image shows the subject, by the judge among all its subjects
    seeds      mean difference of four seeds' images, over that of two sets' drawings of a subject
    colors     share of "a blue fox" whose strongest hue is blue and whose subject is right in any of five answers
    counts     share of "three foxes" with three separate shapes of like size
    pairs      share of "fox and pizza" whose halves show one each, in any of five answers
    seams      slope across the border of a repainted region, over the slope within 12 pixels of it on both sides

Every image has its own seed; `draw` makes images from prompts, seeds and a stack of LoRAs. The subjects are those that
the judge knows in every set it was trained on, so that its own errors do not count; what it sees of other sets is in
its facts, and the report has them.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from inweave.bench.judge import Judge

Floats = NDArray[np.float64]


class Draw(Protocol):
    """Makes one image per prompt."""

    def __call__(
        self, prompts: Sequence[str], seeds: Sequence[int], *, loras: Sequence[str] = (),
        init: Image.Image | None = None, mask: Image.Image | None = None,
    ) -> list[Image.Image]: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bar:
    """One measured number, and what it must be: at least ``limit``, or at most."""

    name: str
    value: float
    limit: float
    at_most: bool = False
    #: how it was counted, and what else was measured with it
    detail: str = ""
    images: Sequence[Image.Image] = field(default=(), repr=False)
    labels: Sequence[str] = field(default=(), repr=False)

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def as_dict(self) -> dict[str, Any]:
        row = {name: value for name, value in asdict(self).items() if name not in ("images", "labels")}
        return {**row, "value": round(self.value, 4), "met": self.is_met}


def spread_over(names: Sequence[str], count: int) -> list[str]:
    """Return ``count`` of the names, evenly over their order."""
    return [names[int(i)] for i in np.linspace(0, len(names) - 1, min(count, len(names)))]


def sure_subjects(referee: Judge) -> list[str]:
    """Return the subjects that the judge knows in every set it was trained on."""
    names: list[str] = referee.facts["sure"]
    return names


def subjects(draw: Draw, referee: Judge, count: int = 512) -> Bar:
    names = spread_over(sure_subjects(referee), count)
    images = draw(names, range(len(names)))
    answers = referee.nearest(images)
    value = sum(map(str.__eq__, answers, names)) / len(names)
    five = referee.right(images, names, 5)
    labels = [name if name == seen else f"{name} (as {seen})" for name, seen in zip(names, answers, strict=True)]
    wrong = sorted(range(len(names)), key=lambda i: labels[i] == names[i])
    detail = f"{len(names)} captions, among {len(referee.subjects)} subjects; {five:.3f} in five"
    visible, words = [images[i] for i in wrong], [labels[i] for i in wrong]
    return Bar("subjects", value, 0.97, detail=detail, images=visible, labels=words)


def seeds(draw: Draw, referee: Judge, count: int = 64, each: int = 4) -> Bar:
    names = spread_over(sure_subjects(referee), count)
    prompts = [name for name in names for _ in range(each)]
    images = draw(prompts, [number % each + 1000 for number in range(len(prompts))])
    apart = [
        difference(images[i + a], images[i + b])
        for i in range(0, len(images), each)
        for a in range(each)
        for b in range(a)
    ]
    drawings = float(referee.facts["drawings_differ"])
    mean = float(np.mean(apart))
    detail = f"{len(names)} captions, {each} seeds: {mean:.2f} of 255; drawings of two sets: {drawings:.2f}"
    return Bar("seeds", mean / drawings, 0.5, detail=detail, images=images, labels=prompts)


def difference(first: Image.Image, second: Image.Image) -> float:
    """Return the mean absolute difference of two images at 64x64 pixels, of 255."""
    small = [
        np.asarray(image.convert("RGB").resize((64, 64), Image.Resampling.BOX), np.float64) for image in (first, second)
    ]
    return float(np.abs(small[0] - small[1]).mean())


_HUES = {"red": 0, "orange": 31, "yellow": 49, "green": 126, "blue": 218, "purple": 275}
_PLAIN = ("fox", "elephant", "octopus", "hamburger", "rocket", "house", "guitar", "frog", "umbrella", "teapot",
          "automobile", "mushroom", "t-shirt", "penguin", "key", "balloon")  # fmt: skip


def colors(draw: Draw, referee: Judge, count: int = 48) -> Bar:
    known = [name for name in _PLAIN if name in referee.subjects]
    requests = [(color, name) for name in known for color in _HUES][:: max(1, 6 * len(known) // count)][:count]
    prompts = [f"a {color} {name}" for color, name in requests]
    images = draw(prompts, range(len(prompts)))
    hues = [strongest_hue(image) == color for image, (color, _) in zip(images, requests, strict=True)]
    visible = referee.each_right(images, [name for _, name in requests], 5)
    both = [hue and right for hue, right in zip(hues, visible, strict=True)]
    detail = f"{len(prompts)} captions: color {np.mean(hues):.3f}, subject {np.mean(visible):.3f}"
    return Bar("colors", float(np.mean(both)), 0.9, detail=detail, images=images, labels=prompts)


def strongest_hue(image: Image.Image) -> str | None:
    """Return the name of the hue that covers most of what is not white, gray or black; None without any."""
    small = np.asarray(image.convert("RGB").resize((48, 48), Image.Resampling.BOX), np.float64).reshape(-1, 3) / 255
    votes: dict[str, float] = {}
    for red, green, blue in small:
        hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        if saturation * value < 0.2:
            continue
        near = min(_HUES, key=lambda name: abs((hue * 360 - _HUES[name] + 180) % 360 - 180))
        votes[near] = votes.get(near, 0.0) + saturation * value
    return max(votes, key=votes.__getitem__) if votes else None


_NUMBERS = {"two": 2, "three": 3, "four": 4}
_COMPACT = {"mushroom": "mushrooms", "penguin": "penguins", "pizza": "pizzas", "fox": "foxes", "ghost": "ghosts",
            "balloon": "balloons", "red apple": "red apples", "house": "houses"}  # fmt: skip


def counts(draw: Draw, count: int = 24) -> Bar:
    prompts = [f"{number} {plural}" for plural in _COMPACT.values() for number in _NUMBERS][:count]
    images = draw(prompts, range(len(prompts)))
    answers = [shapes(image) for image in images]
    right = [number == _NUMBERS[prompt.split()[0]] for number, prompt in zip(answers, prompts, strict=True)]
    labels = [f"{prompt}: {number}" for prompt, number in zip(prompts, answers, strict=True)]
    return Bar("counts", float(np.mean(right)), 0.9, detail=f"{len(prompts)} captions", images=images, labels=labels)


def shapes(image: Image.Image) -> int:
    """Return how many separate shapes are at least a third as large as the largest."""
    small = np.asarray(image.convert("RGB").resize((64, 64), Image.Resampling.BOX), np.float64) / 255
    ground = np.median(np.concatenate([small[0], small[-1], small[:, 0], small[:, -1]]), axis=0)
    left = np.abs(small - ground).max(-1) > 0.12
    sizes: list[int] = []
    for start in np.argwhere(left):
        waiting, size = [tuple(start)], 0
        while waiting:
            row, column = waiting.pop()
            if not (0 <= row < 64 and 0 <= column < 64 and left[row, column]):
                continue
            left[row, column], size = False, size + 1
            waiting += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
        if size:
            sizes.append(size)
    return sum(size * 3 >= max(sizes) for size in sizes) if sizes else 0


def pairs(draw: Draw, referee: Judge, count: int = 24) -> Bar:
    known = [name for name in _PLAIN if name in referee.subjects]
    requests = [(known[i % len(known)], known[(i * 5 + 3) % len(known)]) for i in range(2 * count)]
    requests = [pair for pair in requests if pair[0] != pair[1]][:count]
    prompts = [f"{one} and {two}" for one, two in requests]
    images = draw(prompts, range(len(prompts)))
    halves = [image.crop((x, 0, x + image.width // 2, image.height)) for image in images for x in (0, image.width // 2)]
    right = referee.each_right(halves, [name for pair in requests for name in pair], 5)
    both = [all(right[i : i + 2]) for i in range(0, len(right), 2)]
    detail = f"{len(prompts)} captions: halves {np.mean(right):.3f}"
    return Bar("pairs", float(np.mean(both)), 0.9, detail=detail, images=images, labels=prompts)


_REPAINTED = (
    ("red apple", "pizza"),
    ("house", "rocket"),
    ("cat face", "dog face"),
    ("pizza", "red apple"),
    ("automobile", "bus"),
    ("mushroom", "ghost"),
    ("elephant", "fox"),
    ("hamburger", "birthday cake"),
)


def seams(draw: Draw, count: int = 16) -> Bar:
    """Repaint a half, a box or a disk of an image with another subject, and compare slopes at its border."""
    ratios, images, labels = [], [], []
    for number in range(count):
        before, after = _REPAINTED[number % len(_REPAINTED)]
        start = draw([before], [number])[0]
        mask = _region(number // len(_REPAINTED) + number, start.size)
        made = draw([after], [number + 50], init=start, mask=mask)[0]
        ratios.append(seam_ratio(made, mask))
        images += [start, made]
        labels += [before, f"{after}: {ratios[-1]:.2f}"]
    detail = f"{count} images: median {np.median(ratios):.2f}, worst {max(ratios):.2f}"
    return Bar("seams", float(np.mean(ratios)), 1.2, True, detail, images, labels)


def _region(number: int, size: tuple[int, int]) -> Image.Image:
    mask, (width, height) = Image.new("L", size, 0), size
    pen = ImageDraw.Draw(mask)
    if number % 3 == 0:
        pen.rectangle((0, height // 2, width, height), fill=255)
    elif number % 3 == 1:
        pen.rectangle((width // 4, height // 4, width * 3 // 4 - 1, height * 3 // 4 - 1), fill=255)
    else:
        pen.ellipse((width // 5, height // 5, width * 4 // 5, height * 4 // 5), fill=255)
    return mask


def seam_ratio(image: Image.Image, mask: Image.Image, reach: int = 12) -> float:
    """Return the mean step between neighbors on two sides of the mask's border, over that within ``reach`` of it."""
    values = np.asarray(image.convert("RGB"), np.float64)
    inside = np.asarray(mask, np.int64) > 127
    near = _grown(inside, reach) & _grown(~inside, reach)
    across, nearby = [], []
    for axis in (0, 1):
        steps = np.abs(np.diff(values, axis=axis)).mean(-1)
        first, second = (np.take(inside, range(start, inside.shape[axis] - 1 + start), axis) for start in (0, 1))
        close = np.take(near, range(inside.shape[axis] - 1), axis)
        across.append(steps[first != second])
        nearby.append(steps[(first == second) & close])
    return float(np.concatenate(across).mean() / max(np.concatenate(nearby).mean(), 0.5))


def _grown(region: NDArray[np.bool_], reach: int) -> NDArray[np.bool_]:
    for axis in (0, 1):
        padded = np.pad(region, [(reach, reach) if a == axis else (0, 0) for a in (0, 1)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1, axis)
        region = np.asarray(windows.any(-1))
    return region
