"""How A1111 fits a picture to a size: 0 stretches, 1 crops, 2 fills around it (3, in latent space, stretches here)."""

from __future__ import annotations

import io

from PIL import Image, ImageOps

Size = tuple[int | None, int | None]


def resize_input(content: bytes, size: Size, mode: object) -> bytes:
    """A checked picture at the size the client asked for, as PNG."""
    with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
        return _png(_fit(image.convert("RGBA" if image.mode == "RGBA" else "RGB"), size, mode))


def prepare_mask(content: bytes, size: Size, mode: object, invert: bool) -> bytes:
    """A mask at the same size, white where to repaint."""
    with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
        flat: Image.Image = image
        if image.mode == "RGBA":
            flat = Image.new("RGBA", image.size, "black")
            flat.alpha_composite(image)
        mask = _fit(flat.convert("L"), size, mode)
    return _png(ImageOps.invert(mask) if invert else mask)


def _fit(image: Image.Image, size: Size, mode: object) -> Image.Image:
    if size[0] is None or size[1] is None or image.size == size:
        return image
    target = (max(1, size[0]), max(1, size[1]))
    if mode == 1:
        return ImageOps.fit(image, target, Image.Resampling.LANCZOS)
    if mode == 2:
        return ImageOps.pad(image, target, Image.Resampling.LANCZOS)
    return image.resize(target, Image.Resampling.LANCZOS)


def _png(image: Image.Image) -> bytes:
    target = io.BytesIO()
    image.save(target, format="PNG", compress_level=1)
    return target.getvalue()
