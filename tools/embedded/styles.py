"""Make the two style datasets: the same 24 emoji, drawn as pixel art and in ink.

    pixel   16x16 cells, each one latent cell; a cell has the color, of six levels a channel, that covers most of it,
            weighted by its contrast to the surroundings, so that eyes stay
    ink     1 - max(outline, lines, darkness): slopes of alpha and of the strongest color channel, and dark areas

Both are computed from Noto's images, so that a style changes how a thing is drawn, not its shape.
The names of UNSEEN are in no dataset: they show whether the style was learned, not just the images.

    src/inweave/models/emoji/styles/<style>/<name>.png   128x128, on white
    src/inweave/models/emoji/styles/<style>/<name>.txt   its caption: the emoji's name
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tools.embedded.places import SHIPPED, add_work
from tools.embedded.sprites import read_set

Floats = NDArray[np.float64]

NAMES = (
    "grinning face", "smiling face with sunglasses", "crying face", "ghost",
    "fox", "panda", "penguin", "tropical fish", "turtle", "lady beetle", "unicorn", "cactus",
    "hamburger", "banana", "strawberry", "doughnut", "cupcake",
    "automobile", "sailboat", "airplane", "castle",
    "light bulb", "camera", "soccer ball",
)  # fmt: skip
UNSEEN = (
    "cat face", "rocket", "pizza", "octopus", "crown", "robot", "frog", "house", "birthday cake", "dog face",
    "red apple", "snowman", "guitar", "butterfly", "elephant",
)  # fmt: skip

CELLS = 16
SALIENCE = 4.0
LEVEL = 51  # 0, 51, ..., 255
_LUMINANCE = (0.299, 0.587, 0.114)


def blur(plane: Floats, sigma: float) -> Floats:
    """Apply a Gaussian over both axes; border pixels are repeated."""
    reach = int(3 * sigma + 1)
    kernel = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    kernel /= kernel.sum()
    for axis in (0, 1):
        padding = [(reach, reach) if a == axis else (0, 0) for a in (0, 1)]
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(plane, padding, mode="edge"), len(kernel), axis)
        plane = windows @ kernel
    return plane


def ramp(values: Floats, low: float, high: float) -> Floats:
    """Return 0 below ``low``, 1 above ``high``, linear in between."""
    return np.clip((values - low) / (high - low), 0, 1)


def slope(plane: Floats, sigma: float) -> Floats:
    down, right = np.gradient(blur(plane, sigma))
    return np.hypot(down, right)


def on_white(sprite: NDArray[np.uint8]) -> Floats:
    """Return RGB in [0, 1] of straight RGBA on white."""
    alpha = sprite[..., 3:] / 255
    return sprite[..., :3] / 255 * alpha + (1 - alpha)


def pixel(sprite: NDArray[np.uint8]) -> NDArray[np.uint8]:
    size = sprite.shape[0] // CELLS
    colors = _cells(on_white(sprite) * 255)
    cover = _cells(sprite[..., 3:] / 255)[..., 0]
    solid = cover.mean(-1) > 0.45
    means = (colors * cover[..., None]).sum(2) / np.maximum(cover.sum(2), 1e-3)[..., None]
    around = np.stack([blur(means[..., i], 1.2) for i in range(3)], -1)
    pixels = np.full((CELLS, CELLS, 3), 255, np.uint8)
    for row, column in np.argwhere(solid):
        pixels[row, column] = _dominant_color(colors[row, column], cover[row, column], around[row, column])
    return pixels.repeat(size, 0).repeat(size, 1)


def _cells(planes: Floats) -> Floats:
    """Return (rows, columns, pixels of a cell, channels)."""
    size = planes.shape[0] // CELLS
    cut = planes.reshape(CELLS, size, CELLS, size, -1).swapaxes(1, 2)
    return cut.reshape(CELLS, CELLS, size * size, -1)


def _dominant_color(colors: Floats, cover: Floats, around: Floats) -> Floats:
    """Return the level with the largest weighted share of the pixels of one cell."""
    levels, member = np.unique(np.round(colors / LEVEL), axis=0, return_inverse=True)
    shares = np.bincount(member.ravel(), weights=cover + 1e-3)
    standing_out = np.abs(levels * LEVEL - around).mean(1) / 255
    return np.asarray(levels[np.argmax(shares * (1 + SALIENCE * standing_out))] * LEVEL)


def ink(sprite: NDArray[np.uint8]) -> NDArray[np.uint8]:
    color = on_white(sprite)
    outline = ramp(slope(sprite[..., 3] / 255, 1.3), 0.08, 0.18)
    lines = ramp(np.max([slope(color[..., i], 1.0) for i in range(3)], axis=0), 0.06, 0.13)
    darkness = 1 - ramp(blur(color @ np.array(_LUMINANCE), 0.6), 0.22, 0.36)
    gray = 255 * (1 - np.max([outline, lines, darkness], axis=0))
    return np.repeat(gray.round().astype(np.uint8)[..., None], 3, -1)


STYLES: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {"pixel": pixel, "ink": ink}


def write_style(work: Path, name: str, out: Path) -> int:
    """Write one dataset; return its size in bytes."""
    images, emojis = read_set(work, "noto")
    index = {emoji.name: i for i, emoji in enumerate(emojis)}
    out.mkdir(parents=True, exist_ok=True)
    total = 0
    for caption in NAMES:
        path = out / f"{caption.replace(' ', '-')}.png"
        Image.fromarray(STYLES[name](images[index[caption]])).save(path, optimize=True)
        path.with_suffix(".txt").write_text(caption + "\n")
        total += path.stat().st_size
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--out", type=Path, default=SHIPPED / "styles")
    options = parser.parse_args()
    for name in STYLES:
        size = write_style(options.work, name, options.out / name)
        print(f"{name}: {len(NAMES)} images, {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
