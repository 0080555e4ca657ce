"""Contact sheets: images side by side, with labels, on white."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

INK, FAINT, LINE, PAPER = "#1f2328", "#6e7781", "#d8dee4", "#ffffff"
GAP, MARGIN = 12, 20


@dataclass(frozen=True, slots=True)
class Sheet:
    """``cells`` row by row; a row or column without a label has an empty one."""

    cells: Sequence[Sequence[Image.Image]]
    columns: Sequence[str]
    rows: Sequence[str]
    title: str = ""

    def render(self, cell: int | None = None) -> Image.Image:
        """Return the sheet as one image; ``cell`` is the longer side of each image on it."""
        side = cell or max(max(image.size) for row in self.cells for image in row)
        large, small = font(max(15, side // 9)), font(max(13, side // 10))
        pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
        left = max((_width(pen, label, small) for label in self.rows), default=0)
        left += MARGIN if left else 0
        top = int(large.size * 2.2) if self.title else 0
        head = int(small.size * 1.9) if any(self.columns) else 0
        across = max(side, *(_width(pen, label, small) for label in self.columns)) if self.columns else side
        width = MARGIN * 2 + left + len(self.cells[0]) * (across + GAP) - GAP
        width = max(width, MARGIN * 2 + _width(pen, self.title, large))
        height = MARGIN * 2 + top + head + len(self.cells) * (side + GAP) - GAP
        paper = Image.new("RGB", (int(width), int(height)), PAPER)
        pen = ImageDraw.Draw(paper)
        if self.title:
            pen.text((MARGIN, MARGIN), self.title, fill=INK, font=large)
        for number, label in enumerate(self.columns):
            x = MARGIN + left + number * (across + GAP) + across / 2
            pen.text((x, MARGIN + top), label, fill=FAINT, font=small, anchor="mt")
        for line, row in enumerate(self.cells):
            y = MARGIN + top + head + line * (side + GAP)
            if line < len(self.rows):
                pen.text((MARGIN, y + side / 2), self.rows[line], fill=INK, font=small, anchor="lm")
            for number, image in enumerate(row):
                resized = _resize(image, side)
                x = MARGIN + left + number * (across + GAP) + (across - resized.width) // 2
                corner = (int(x), int(y + (side - resized.height) // 2))
                paper.paste(resized, corner)
                pen.rectangle(
                    (corner[0] - 1, corner[1] - 1, corner[0] + resized.width, corner[1] + resized.height), outline=LINE
                )
        return paper


def _resize(image: Image.Image, side: int) -> Image.Image:
    scale = side / max(image.size)
    if scale == 1:
        return image
    size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
    return image.resize(size, Image.Resampling.LANCZOS)


def font(size: int) -> ImageFont.FreeTypeFont:
    """Return the font of all labels."""
    default = ImageFont.load_default(size)
    assert isinstance(default, ImageFont.FreeTypeFont)  # Pillow comes with a scalable one
    return default


def _width(pen: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont) -> int:
    return int(pen.textlength(text, font=font)) if text else 0
