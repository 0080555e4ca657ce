"""Checked images at the size that a request asks for."""

from __future__ import annotations

import io

from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngImageFile

MAX_SIDE = 4096
Size = tuple[int | None, int | None]


def resize_input(content: bytes, size: Size, mode: int) -> bytes:
    """Return a checked image at the requested size, as PNG."""
    with open_png(content) as image:
        return png_bytes(fit(image.convert("RGBA" if image.mode == "RGBA" else "RGB"), size, mode))


def fit(
    image: Image.Image, size: Size, mode: int, resampling: Image.Resampling = Image.Resampling.LANCZOS
) -> Image.Image:
    """Return an image at a size: ``mode`` 1 crops it, 2 fills around it, others stretch it."""
    if size[0] is None or size[1] is None or image.size == size:
        return image
    target = (max(1, size[0]), max(1, size[1]))
    if mode == 1:
        return ImageOps.fit(image, target, resampling)
    if mode == 2:
        return ImageOps.pad(image, target, resampling)
    return image.resize(target, resampling)


def open_png(content: bytes) -> PngImageFile:
    """Decode a PNG that was checked."""
    image = Image.open(io.BytesIO(content), formats=("PNG",))
    assert isinstance(image, PngImageFile)
    image.load()
    return image


def png_bytes(image: Image.Image) -> bytes:
    """Encode an image as PNG."""
    target = io.BytesIO()
    image.save(target, format="PNG", compress_level=1)
    return target.getvalue()
