"""Masked and extended images: the colors around a mask, and a canvas with more room at its sides."""

from __future__ import annotations

from PIL import Image, ImageOps

from inweave.generate.enlarge import Outpaint

FILL_SIDE = 512  # the colors around a mask are smooth: they are computed at this size


def extended(image: Image.Image, mask: Image.Image | None, sides: Outpaint) -> tuple[Image.Image, Image.Image]:
    """Return a canvas and its mask: the image with more at its sides, which the mask says to paint.

    The new part starts from the colors at the border of the image. The mask reaches ``blend`` pixels into the image,
    over which the new fades into the old; ``mask``, of the image, is painted too.
    """
    size = sides.size_of(image.size)
    corner = (sides.left, sides.top)
    canvas, known = Image.new("RGB", size), Image.new("L", size, 255)
    canvas.paste(image, corner)
    known.paste(0, (*corner, corner[0] + image.width, corner[1] + image.height))
    canvas = fill_masked(canvas, known)
    area = Image.new("L", size, 255)
    inner = (
        sides.left + (sides.blend if sides.left else 0),
        sides.top + (sides.blend if sides.top else 0),
        sides.left + image.width - (sides.blend if sides.right else 0),
        sides.top + image.height - (sides.blend if sides.bottom else 0),
    )
    if inner[0] < inner[2] and inner[1] < inner[3]:
        area.paste(0, inner)
    if mask is not None:
        area.paste(255, corner, mask)
    return canvas, area


def fill_masked(image: Image.Image, mask: Image.Image) -> Image.Image:
    """Return an image with its masked part replaced by the colors around it: averages of ever larger neighborhoods."""
    scale = min(1.0, FILL_SIDE / max(image.size))
    known = image.convert("RGBA")
    known.putalpha(ImageOps.invert(mask))
    levels = [_coarser(known, (max(1, round(image.width * scale)), max(1, round(image.height * scale))))]
    while max(levels[-1].size) > 1:
        levels.append(_coarser(levels[-1], ((levels[-1].width + 1) // 2, (levels[-1].height + 1) // 2)))
    if levels[-1].getchannel("A").getextrema() == (0, 0):
        return image  # all of it is masked: there is nothing around it
    colors = levels.pop()
    while levels:
        finer = levels.pop()
        colors = colors.resize(finer.size, Image.Resampling.BILINEAR)
        colors.alpha_composite(finer)
    return Image.composite(colors.convert("RGB").resize(image.size, Image.Resampling.BICUBIC), image, mask)


def _coarser(level: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Average the pixels that are not transparent; the result is transparent where all of its parts are."""
    smaller = level.resize(size, Image.Resampling.BOX)
    smaller.putalpha(smaller.getchannel("A").point(lambda alpha: 255 if alpha else 0))
    return smaller
