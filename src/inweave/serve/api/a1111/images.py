"""Images before and after A1111 requests: fitted to a size, filled under the mask, cropped to the masked part.

resize_mode         0 stretches, 1 crops, 2 fills around it (3, in latent space, stretches here)
inpainting_fill     0 starts from the colors around the mask, 1 from the image (2 and 3, in latent space, like 0)
inpaint_full_res    only the mask's surroundings are repainted, enlarged to the requested size, then put back:

    region = the mask's bounding box + padding, widened to the shape of the requested size, inside the image
"""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image, ImageChops, ImageFilter, ImageOps
from PIL.PngImagePlugin import PngInfo

from inweave.generate.canvas import fill_masked
from inweave.serve.api.resize import Size, fit, open_png, png_bytes

Box = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class MaskSettings:
    """How a masked image is prepared."""

    invert: bool = False
    blur: int = 4
    fill: bool = True
    only_masked: bool = True
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Inpainting:
    """An image and its mask, ready to be repainted; with a ``region``, they are that part of ``whole``."""

    image: bytes
    mask: bytes
    region: Box | None = None
    whole: bytes = b""
    whole_mask: bytes = b""
    blur: int = 0

    def restore(self, result: bytes) -> bytes:
        """Return the whole image with the region repainted; every pixel outside the mask keeps its bits."""
        if self.region is None:
            return result
        left, top, right, bottom = self.region
        with open_png(result) as new, open_png(self.whole) as old, open_png(self.whole_mask) as mask:
            part = mask.convert("L").crop(self.region)
            if self.blur:
                soft = part.filter(ImageFilter.GaussianBlur(self.blur / 2)).point(lambda value: max(0, 2 * value - 255))
                part = ImageChops.darker(soft, part)
            painted = old.convert("RGB")
            small = new.convert("RGB").resize((right - left, bottom - top), Image.Resampling.LANCZOS)
            painted.paste(small, (left, top), part)
            texts = PngInfo()
            for name, text in new.text.items():
                texts.add_itxt(name, text, zip=True)
        target = io.BytesIO()
        painted.save(target, format="PNG", pnginfo=texts)
        return target.getvalue()


def prepare_inpainting(
    content: bytes, mask_content: bytes, size: Size, mode: int, settings: MaskSettings
) -> Inpainting:
    """Return a checked image and mask prepared like A1111 does; white is repainted."""
    with open_png(content) as source, open_png(mask_content) as mask_source:
        image = _flat(source, "white").convert("RGB")
        mask = _flat(mask_source, "black").convert("L").point(lambda value: 255 if value >= 128 else 0)
        if settings.invert:
            mask = ImageOps.invert(mask)
        if settings.only_masked:
            mask = mask if mask.size == image.size else mask.resize(image.size, Image.Resampling.NEAREST)
        else:
            image, mask = fit(image, size, mode), fit(mask, size, mode, Image.Resampling.NEAREST)
            mask = mask if mask.size == image.size else mask.resize(image.size, Image.Resampling.NEAREST)
        target = (size[0] or image.width, size[1] or image.height)
        region = crop_region(mask, settings.padding, target) if settings.only_masked else None
        work, work_mask = fill_masked(image, mask) if settings.fill else image, mask
        if settings.only_masked:
            box = region or (0, 0, *image.size)
            work = work.crop(box).resize(target, Image.Resampling.LANCZOS)
            work_mask = mask.crop(box).resize(target, Image.Resampling.NEAREST)
        if region is None:
            return Inpainting(png_bytes(work), png_bytes(work_mask))
        return Inpainting(
            png_bytes(work), png_bytes(work_mask), region, png_bytes(image), png_bytes(mask), settings.blur
        )


def crop_region(mask: Image.Image, padding: int, target: tuple[int, int]) -> Box | None:
    """Return the part of an image around the white of its mask, with the aspect ratio of ``target`` if it fits."""
    box = mask.getbbox()
    if box is None:
        return None
    left, right = max(0, box[0] - padding), min(mask.width, box[2] + padding)
    top, bottom = max(0, box[1] - padding), min(mask.height, box[3] + padding)
    width, height = right - left, bottom - top
    wide = min(mask.width, max(width, round(height * target[0] / target[1])))
    high = min(mask.height, max(height, round(width * target[1] / target[0])))
    left = min(max(0, left - (wide - width) // 2), mask.width - wide)
    top = min(max(0, top - (high - height) // 2), mask.height - high)
    return left, top, left + wide, top + high


def _flat(image: Image.Image, background: str) -> Image.Image:
    if image.mode != "RGBA":
        return image
    flat = Image.new("RGBA", image.size, background)
    flat.alpha_composite(image)
    return flat
