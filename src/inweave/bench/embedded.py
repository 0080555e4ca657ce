"""Metrics of the embedded model, computed from pixels: does it follow its captions, and does a style show?

    features       16x16 means of red, green, blue and of the slope of the luminance, each centered and of unit length:
                   the look of a subject, largely independent of sharpness and brightness
    recall         share of captions whose image is nearest, among all references, to the reference of that caption
    strokes        8x8 patches, aligned with the latent grid: |dx| and |dy| of the luminance at every pixel and the mean
                   of the two color differences. The drawing style, largely independent of the subject
    style distance between two sets of images, as Gaussians of their strokes (m, C): the Frechet distance
                   d^2 = |m1 - m2|^2 + trace(C1 + C2 - 2 (C1 C2)^(1/2))

Pixel art has slopes only at the borders of its cells; ink has steep slopes and no color. Blank patches are ignored.
Everything is plain arithmetic on arrays: no network, no random numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from inweave.errors import ConfigError, FormatError
from inweave.files.images import open_image

Floats: TypeAlias = NDArray[np.float64]
Generate: TypeAlias = Callable[[list[str]], list[Image.Image]]

#: the folder of the embedded model, with the reference sheet
EMOJI = Path(__file__).parents[1] / "models" / "emoji"

_SIDE = 16
_WORKING = 128
_PATCH = 8
_BLANK = 0.01  # mean slope below which a patch counts as blank
_LUMINANCE = np.array([0.299, 0.587, 0.114])


def features(image: Image.Image) -> Floats:
    """Return the unit vector of an image: the squared distance of two is between 0 (alike) and 4."""
    small = np.asarray(_rgb(image).resize((2 * _SIDE, 2 * _SIDE), Image.Resampling.BOX), dtype=np.float64) / 255
    down, right = np.gradient(small @ _LUMINANCE)
    planes = np.concatenate([small, np.hypot(down, right)[..., None]], axis=-1)
    blocks = planes.reshape(_SIDE, 2, _SIDE, 2, 4).mean((1, 3))
    color, slope = blocks[..., :3].ravel(), blocks[..., 3].ravel()
    return _unit(np.concatenate([_unit(color - color.mean()), _unit(slope - slope.mean())]))


def recall(generated: Sequence[Image.Image], references: Sequence[Image.Image]) -> tuple[float, float]:
    """Return (top-1, top-5): how often reference i is the nearest to image i, or among its five nearest."""
    if not generated or len(generated) > len(references):
        raise ConfigError(
            f"recall compares image i with reference i: got {len(generated)} images and {len(references)} references"
        )
    queries, known = _stack(generated), _stack(references)
    # squared distances of unit vectors, without the 2
    order = np.argsort(1 - queries @ known.T, axis=1, kind="stable")
    own = np.arange(len(queries))[:, None]
    return float((order[:, :1] == own).mean()), float((order[:, :5] == own).any(axis=1).mean())


def strokes(image: Image.Image) -> Floats:
    """Return (patches that are not blank, 130): |dx| and |dy| at 8x8 pixels, and two color differences."""
    image = _rgb(image)
    if image.size != (_WORKING, _WORKING):
        image = image.resize((_WORKING, _WORKING), Image.Resampling.BICUBIC)
    values = np.asarray(image, dtype=np.float64) / 255
    light = values @ _LUMINANCE
    right = np.abs(np.diff(light, axis=1, append=light[:, -1:]))
    down = np.abs(np.diff(light, axis=0, append=light[-1:]))
    slopes = np.concatenate([_patches(right), _patches(down)], axis=1)
    red_green = _patches(values[..., 0] - values[..., 1]).mean(1)
    blue_yellow = _patches(values[..., 2] - values[..., :2].mean(-1)).mean(1)
    patches = np.column_stack([slopes, red_green, blue_yellow])
    return np.asarray(patches[slopes.mean(1) > _BLANK])


def closer_to_style(
    generated: Sequence[Image.Image], style_images: Sequence[Image.Image], base_images: Sequence[Image.Image]
) -> dict[str, float]:
    """Compare ``generated`` with the style and with the base.

    ``to_style`` and ``to_base`` are style distances; ``ratio`` is the first over the second, below 1 if the style won.
    ``share`` is the share of images whose mean stroke is nearer to the style's mean than to the base's, each direction
    in units of the standard deviation of single images.
    """
    made, style, base = _all_strokes(generated), _all_strokes(style_images), _all_strokes(base_images)
    to_style, to_base = _frechet(made, style), _frechet(made, base)
    means = [
        np.stack([strokes(image).mean(0) for image in _not_blank(images)]) for images in (style_images, base_images)
    ]
    deviation = np.sqrt((means[0].var(0) + means[1].var(0)) / 2) + 1e-3
    mine = np.stack([strokes(image).mean(0) for image in _not_blank(generated)])
    near, far = (np.square((mine - mean.mean(0)) / deviation).sum(1) for mean in means)
    ratio, share = to_style / max(to_base, 1e-12), float((near < far).mean())
    return {"to_style": to_style, "to_base": to_base, "ratio": ratio, "share": share}


def reference(folder: Path = EMOJI) -> tuple[list[str], list[Image.Image]]:
    """Return the captions of the reference sheet and their thumbnails, in the same order."""
    document = json.loads((folder / "reference.json").read_text())
    captions, side, columns = list(document["captions"]), int(document["side"]), int(document["columns"])
    with open_image(folder / "reference.png") as opened:
        sheet = _rgb(opened)
    rows = -(-len(captions) // columns)
    if sheet.size != (columns * side, rows * side):
        raise FormatError(
            f"{folder / 'reference.png'}: {sheet.size[0]}x{sheet.size[1]} pixels, but reference.json lists "
            f"{len(captions)} thumbnails of {side} pixels in {columns} columns; make both again with "
            "tools/embedded/reference.py"
        )
    corners = [(i % columns * side, i // columns * side) for i in range(len(captions))]
    return captions, [sheet.crop((x, y, x + side, y + side)) for x, y in corners]


def style_set(name: str, folder: Path = EMOJI) -> tuple[list[str], list[Image.Image]]:
    """Return the captions and images of a bundled style dataset."""
    paths = sorted((folder / "styles" / name).glob("*.png"))
    if not paths:
        known = ", ".join(sorted(path.name for path in (folder / "styles").glob("*"))) or "none"
        raise ConfigError(f"there is no style dataset {name!r}; known: {known}")
    captions = [path.with_suffix(".txt").read_text().strip() for path in paths]
    images = []
    for path in paths:
        with open_image(path) as opened:
            images.append(_rgb(opened))
    return captions, images


def measure_recall(generate: Generate, count: int = 256, folder: Path = EMOJI) -> dict[str, float]:
    """Generate the first ``count`` captions of the reference sheet, and find each image among all references."""
    captions, thumbnails = reference(folder)
    top1, top5 = recall(generate(captions[:count]), thumbnails)
    return {"captions": float(min(count, len(captions))), "top1": top1, "top5": top5}


def measure_style(
    styled: Generate, base: Generate, captions: list[str], style: str, folder: Path = EMOJI
) -> dict[str, float]:
    """Compare images with and without an adapter to the dataset of the style it was trained on."""
    return closer_to_style(styled(captions), style_set(style, folder)[1], base(captions))


def _rgb(image: Image.Image) -> Image.Image:
    """Return the image in RGB, with transparency on white."""
    if "A" in image.getbands() or "transparency" in image.info:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def _unit(vector: Floats) -> Floats:
    return np.asarray(vector / max(float(np.linalg.norm(vector)), 1e-12))


def _stack(images: Sequence[Image.Image]) -> Floats:
    return np.stack([features(image) for image in images])


def _patches(plane: Floats) -> Floats:
    """Return (256, 64): the aligned 8x8 patches of a 128x128 plane."""
    count = _WORKING // _PATCH
    return plane.reshape(count, _PATCH, count, _PATCH).swapaxes(1, 2).reshape(count * count, -1)


def _not_blank(images: Sequence[Image.Image]) -> list[Image.Image]:
    visible = [image for image in images if len(strokes(image))]
    if not visible:
        raise ConfigError(f"all {len(images)} images are blank; a style distance needs images that show something")
    return visible


def _all_strokes(images: Sequence[Image.Image]) -> Floats:
    return np.concatenate([strokes(image) for image in _not_blank(images)])


def _frechet(first: Floats, second: Floats) -> float:
    difference = first.mean(0) - second.mean(0)
    one, two = np.cov(first.T), np.cov(second.T)
    root = _square_root(one)
    cross = np.sqrt(np.clip(np.linalg.eigvalsh(root @ two @ root), 0, None)).sum()
    squared = difference @ difference + np.trace(one) + np.trace(two) - 2 * cross
    return float(np.sqrt(max(squared, 0.0)))


def _square_root(matrix: Floats) -> Floats:
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T)
