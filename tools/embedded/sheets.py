"""Contact sheets: images in a grid, with optional labels of rows and columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw

_GAP = 4
_GRAY = (200, 200, 200)


def to_images(images: torch.Tensor) -> list[Image.Image]:
    """Convert (n, 3, h, w) in [-1, 1] to images."""
    values = ((images.float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(np.ascontiguousarray(value)) for value in values]


def sheet(
    images: Sequence[Image.Image],
    columns: int,
    *,
    heads: Sequence[str] = (),
    rows: Sequence[str] = (),
    labels: Sequence[str] = (),
) -> Image.Image:
    """Arrange ``images`` row by row; ``heads`` name the columns, ``rows`` the rows, ``labels`` the images."""
    width, height = images[0].size
    if labels:
        return sheet([_labeled(*pair) for pair in zip(images, labels, strict=True)], columns, heads=heads, rows=rows)
    left, top = (150 if rows else 0), (18 if heads else 0)
    count = -(-len(images) // columns)
    size = (left + columns * (width + _GAP), top + count * (height + _GAP))
    canvas = Image.new("RGB", size, _GRAY if not (rows or heads) else "white")
    pen = ImageDraw.Draw(canvas)
    for i, image in enumerate(images):
        row, column = divmod(i, columns)
        canvas.paste(image, (left + column * (width + _GAP) + _GAP // 2, top + row * (height + _GAP) + _GAP // 2))
    for i, words in enumerate(heads):
        pen.text((left + i * (width + _GAP) + 4, 4), words, fill="black")
    for i, words in enumerate(rows):
        pen.text((4, top + i * (height + _GAP) + height // 2), words, fill="black")
    return canvas


def _labeled(image: Image.Image, words: str) -> Image.Image:
    """Return an image with up to three lines of text below it."""
    canvas = Image.new("RGB", (image.width, image.height + 36), "white")
    canvas.paste(image, (0, 0))
    pen, lines = ImageDraw.Draw(canvas), [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], longer] if pen.textlength(longer) <= image.width - 2 else [*lines, word]
    for number, line in enumerate(lines[:3]):
        pen.text((1, image.height + number * 12), line, fill="black")
    return canvas
