"""The judge: which subject does an image show? A linear discriminant of edges, colors and shape, fitted on seven sets.

    descriptor   the drawing without its ground, in the middle of 64x64 pixels:
                 edges    8x8 cells, 8 directions (half a turn), each cell and its neighbors of unit length
                 colors   8x8 cells, light and two color differences
                 shape    16x16 cells, how much of each is drawn
    look         W (descriptor - mean), of unit length; W is the inverse root of the covariance *within* subjects,
                 which is how sets differ in drawing the same thing, then the directions in which subjects differ most
    subject      the one whose mean look is nearest

`python -m tools.embedded.fit_judge` fits it, in a minute, on drawings and on the same in gray, as lines, mirrored.
The file's metadata holds its subjects and how often it is right on the sets it was fitted without, which is as much
as it can say of an image. Nothing in it is random.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open

from inweave.bench.embedded import EMOJI
from inweave.errors import ConfigError

Floats: TypeAlias = NDArray[np.float32]
FILE = EMOJI / "judge.safetensors"
SIDE = 64
_CELLS, _DIRECTIONS, _SHAPE = 8, 8, 16
#: what differs less than this from the color of the corners is ground
_GROUND = 0.07


@dataclass(frozen=True, slots=True)
class Judge:
    """A fitted discriminant: ``mean`` (d), ``matrix`` (d, k) and the subjects' looks (n, k)."""

    mean: Floats
    matrix: Floats
    directions: Floats
    subjects: tuple[str, ...]
    #: facts of its fitting: the sets, and the share of right answers on sets it has not seen
    facts: dict[str, Any]

    def looks(self, images: Sequence[Image.Image]) -> Floats:
        """Return one unit vector per image."""
        rows = np.stack([descriptor(image) for image in images]) - self.mean
        return unit(np.asarray(rows @ self.matrix, np.float32))

    def nearest(self, images: Sequence[Image.Image]) -> list[str]:
        """Return the subject of each image."""
        return [self.subjects[int(i)] for i in (self.looks(images) @ self.directions.T).argmax(1)]

    def each_right(self, images: Sequence[Image.Image], subjects: Sequence[str], among: int = 1) -> list[bool]:
        """Return for each image whether its subject is among the judge's first answers."""
        likeness = self.looks(images) @ self.directions.T
        own = [likeness[row, self.number(name)] for row, name in enumerate(subjects)]
        return [bool((row > mine).sum() < among) for row, mine in zip(likeness, own, strict=True)]

    def right(self, images: Sequence[Image.Image], subjects: Sequence[str], among: int = 1) -> float:
        """Return the share of images whose subject is among the judge's first answers."""
        return float(np.mean(self.each_right(images, subjects, among)))

    def number(self, subject: str) -> int:
        if subject not in self.subjects:
            raise ConfigError(f"the judge does not know {subject!r}; it was fitted on {len(self.subjects)} subjects")
        return self.subjects.index(subject)


@cache
def load_judge(path: Path = FILE) -> Judge:
    """Return the judge that comes with the embedded model, or another one."""
    if not path.exists():
        raise ConfigError(f"{path}: no judge is there; make it with: python -m tools.embedded.fit_judge")
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        mean, matrix, directions = (file.get_tensor(name).astype(np.float32) for name in ("mean", "matrix", "looks"))
    return Judge(mean, matrix, directions, tuple(json.loads(metadata["subjects"])), json.loads(metadata["facts"]))


def trimmed(image: Image.Image, side: int = SIDE) -> tuple[Floats, Floats]:
    """Return the drawing in the middle of white (side, side, 3) in 0..1, and how much of each pixel is drawn."""
    values = np.asarray(image.convert("RGB"), np.float32) / 255
    ground = np.median(np.concatenate([values[0], values[-1], values[:, 0], values[:, -1]]), axis=0)
    cover_now = np.clip(np.abs(values - ground).max(-1) / _GROUND - 1, 0, 1)
    visible = np.argwhere(cover_now > 0.5)
    if not len(visible):
        return np.ones((side, side, 3), np.float32), np.zeros((side, side), np.float32)
    (top, left), (bottom, right) = visible.min(0), visible.max(0) + 1
    length = max(int(bottom - top), int(right - left))
    place = (length - int(bottom - top)) // 2, (length - int(right - left)) // 2
    canvas = np.ones((length, length, 4), np.float32)
    canvas[..., 3] = 0
    inner = canvas[place[0] : place[0] + bottom - top, place[1] : place[1] + right - left]
    cover = cover_now[top:bottom, left:right, None]
    inner[..., :3] = values[top:bottom, left:right] * cover + 1 - cover
    inner[..., 3:] = cover
    planes = [
        np.asarray(Image.fromarray(canvas[..., i]).resize((side, side), Image.Resampling.BILINEAR), np.float32)
        for i in range(4)
    ]
    return np.stack(planes[:3], -1), planes[3]


def descriptor(image: Image.Image) -> Floats:
    """Return the edges, colors and shape of an image's drawing."""
    colors, cover_now = trimmed(image)
    return describe(colors, cover_now)


def describe(colors: Floats, cover_now: Floats) -> Floats:
    down, right = np.gradient(np.concatenate([colors, cover_now[..., None]], -1), axis=(0, 1))
    strength = np.hypot(down, right)
    steepest = strength.argmax(-1)[..., None]
    strength = np.take_along_axis(strength, steepest, -1)[..., 0]
    turn = np.arctan2(np.take_along_axis(down, steepest, -1), np.take_along_axis(right, steepest, -1))[..., 0]
    place = (turn % np.pi) / np.pi * _DIRECTIONS
    low = place.astype(np.int64) % _DIRECTIONS
    share = (place - np.floor(place)).astype(np.float32)
    planes = np.zeros((SIDE, SIDE, _DIRECTIONS), np.float32)
    np.put_along_axis(planes, low[..., None], (strength * (1 - share))[..., None], -1)
    more = np.zeros_like(planes)
    np.put_along_axis(more, ((low + 1) % _DIRECTIONS)[..., None], (strength * share)[..., None], -1)
    edges = np.sqrt(_means(planes + more, _CELLS))
    around = np.pad(edges, ((1, 1), (1, 1), (0, 0)))
    energy = sum(
        np.square(around[y : y + _CELLS, x : x + _CELLS]).sum(-1, keepdims=True) for y in range(3) for x in range(3)
    )
    edges = edges / np.sqrt(energy + 1e-3)
    light = colors.mean(-1)
    opponents = np.stack([light, colors[..., 0] - colors[..., 1], colors[..., 2] - colors[..., :2].mean(-1)], -1)
    shape = _means(cover_now[..., None], _SHAPE)
    parts = (edges.ravel() * 1.5, _means(opponents, _CELLS).ravel(), shape.ravel() * 0.5)
    return np.concatenate(parts).astype(np.float32)


def unit(rows: Floats) -> Floats:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9), np.float32)


def _means(planes: Floats, cells: int) -> Floats:
    size = planes.shape[0] // cells
    return np.asarray(planes.reshape(cells, size, cells, size, -1).mean((1, 3)))
