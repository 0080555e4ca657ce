"""What A1111 does to pictures before and after: fit them to a size, fill what is masked, work on the masked part alone.

resize_mode         0 stretches, 1 crops, 2 fills around it (3, in latent space, stretches here)
inpainting_fill     0 starts from the colors around the mask, 1 from what is there (2 and 3, latent noise and nothing, as 0 here)
inpaint_full_res    only the mask's surroundings are repainted, enlarged to the requested size, and put back in their place:

    region = the mask's bounding box + padding, widened to the shape of the requested size, inside the picture
"""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image, ImageChops, ImageFilter, ImageOps
from PIL.PngImagePlugin import PngImageFile, PngInfo

Box = tuple[int, int, int, int]
Size = tuple[int | None, int | None]
FILL_SIDE = 512  # the colors around a mask are smooth: they are computed at this size


@dataclass(frozen=True, slots=True)
class MaskSettings:
    """How a masked picture is prepared."""

    invert: bool = False
    blur: int = 4
    fill: bool = True
    only_masked: bool = True
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Inpainting:
    """A picture and its mask, ready to be repainted; with a ``region``, they are that part of ``whole``."""

    image: bytes
    mask: bytes
    region: Box | None = None
    whole: bytes = b""
    whole_mask: bytes = b""
    blur: int = 0

    def restore(self, result: bytes) -> bytes:
        """The whole picture with the region repainted; every pixel outside the mask keeps its bits."""
        if self.region is None:
            return result
        left, top, right, bottom = self.region
        with _open(result) as new, _open(self.whole) as old, _open(self.whole_mask) as mask:
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


def resize_input(content: bytes, size: Size, mode: int) -> bytes:
    """A checked picture at the size the client asked for, as PNG."""
    with _open(content) as image:
        return _png(_fit(image.convert("RGBA" if image.mode == "RGBA" else "RGB"), size, mode))


def prepare_inpainting(
    content: bytes, mask_content: bytes, size: Size, mode: int, settings: MaskSettings
) -> Inpainting:
    """A checked picture and mask as A1111 would repaint them; white is repainted."""
    with _open(content) as source, _open(mask_content) as mask_source:
        image = _flat(source, "white").convert("RGB")
        mask = _flat(mask_source, "black").convert("L").point(lambda value: 255 if value >= 128 else 0)
        if settings.invert:
            mask = ImageOps.invert(mask)
        if settings.only_masked:
            mask = mask if mask.size == image.size else mask.resize(image.size, Image.Resampling.NEAREST)
        else:
            image, mask = _fit(image, size, mode), _fit(mask, size, mode, Image.Resampling.NEAREST)
            mask = mask if mask.size == image.size else mask.resize(image.size, Image.Resampling.NEAREST)
        target = (size[0] or image.width, size[1] or image.height)
        region = crop_region(mask, settings.padding, target) if settings.only_masked else None
        work, work_mask = fill_masked(image, mask) if settings.fill else image, mask
        if settings.only_masked:
            box = region or (0, 0, *image.size)
            work = work.crop(box).resize(target, Image.Resampling.LANCZOS)
            work_mask = mask.crop(box).resize(target, Image.Resampling.NEAREST)
        if region is None:
            return Inpainting(_png(work), _png(work_mask))
        return Inpainting(_png(work), _png(work_mask), region, _png(image), _png(mask), settings.blur)


def crop_region(mask: Image.Image, padding: int, target: tuple[int, int]) -> Box | None:
    """The part of a picture around the white of its mask, with the shape of ``target`` as far as the picture reaches."""
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


def fill_masked(image: Image.Image, mask: Image.Image) -> Image.Image:
    """The picture with what is masked replaced by the colors around it: averages of ever larger neighborhoods."""
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
    """Averages of what is not transparent; a pixel is transparent where all of its parts are."""
    smaller = level.resize(size, Image.Resampling.BOX)
    smaller.putalpha(smaller.getchannel("A").point(lambda alpha: 255 if alpha else 0))
    return smaller


def _open(content: bytes) -> PngImageFile:
    image = Image.open(io.BytesIO(content), formats=("PNG",))
    assert isinstance(image, PngImageFile)
    image.load()
    return image


def _flat(image: Image.Image, background: str) -> Image.Image:
    if image.mode != "RGBA":
        return image
    flat = Image.new("RGBA", image.size, background)
    flat.alpha_composite(image)
    return flat


def _fit(
    image: Image.Image, size: Size, mode: int, resampling: Image.Resampling = Image.Resampling.LANCZOS
) -> Image.Image:
    if size[0] is None or size[1] is None or image.size == size:
        return image
    target = (max(1, size[0]), max(1, size[1]))
    if mode == 1:
        return ImageOps.fit(image, target, resampling)
    if mode == 2:
        return ImageOps.pad(image, target, resampling)
    return image.resize(target, resampling)


def _png(image: Image.Image) -> bytes:
    target = io.BytesIO()
    image.save(target, format="PNG", compress_level=1)
    return target.getvalue()
