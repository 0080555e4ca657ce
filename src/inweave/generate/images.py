"""Images in and out: any size in, multiples of the model's patch inside, the same size out.

mask     white is repainted; anything lighter than half counts as white
feather  alpha = 2 * blurred mask - 1, clamped to 0..1: new fades into old inside the mask only, so every pixel
         outside keeps its bits
"""

from __future__ import annotations

import os

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps

from inweave.errors import RequestError
from inweave.files.images import read_image
from inweave.models.families.references import ReferenceFit

MAX_PIXELS = 64 * 1024 * 1024
ImageInput = str | os.PathLike[str] | Image.Image


def open_image(source: ImageInput, label: str) -> Image.Image:
    """Return an image from a file or from memory, upright and in RGB; ``label`` names it in errors."""
    if isinstance(source, Image.Image):
        image = source
    else:
        image = read_image(source, error=lambda text: RequestError(f"{label} {text}"), pixels=MAX_PIXELS).image
    image = ImageOps.exif_transpose(image)  # what a file says of it was followed and removed
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        background = Image.new("RGBA", image.size, "white")
        background.alpha_composite(image.convert("RGBA"))
        image = background
    return image.convert("RGB")


def open_mask(source: ImageInput, size: tuple[int, int]) -> Image.Image:
    """Return a mask of black and white only, of the image's ``size``."""
    mask = open_image(source, "mask").convert("L")
    if mask.size != size:
        mask = mask.resize(size, Image.Resampling.NEAREST)
    return mask.point(lambda value: 255 if value >= 128 else 0)


def working_size(image: tuple[int, int], native: int, patch: int) -> tuple[int, int]:
    """Return the size to generate at: the image's own, or the model's area if the image is much larger than that."""
    width, height = image
    limit = (1.5 * native) ** 2
    scale = (native * native / (width * height)) ** 0.5 if width * height > limit else 1.0
    scale = max(scale, 64 / min(width, height))
    width, height = (min(max(round(side * scale / patch) * patch, 64), 4096) for side in (width, height))
    return width, height


def size_warnings(size: tuple[int, int], image: tuple[int, int] | None, native: int) -> list[str]:
    """Return warnings about the size of a request; ``image``: the size of the image it starts from.

    A model repeats its subject where an image is much larger than those it was trained on, and loses it where it is
    much smaller.
    """
    width, height = size
    if image is not None and size != image:
        return [
            f"the image of {image[0]}x{image[1]} pixels is edited at {width}x{height}; the result has the image's size"
        ]
    if image is not None:
        return []
    if width * height > (1.5 * native) ** 2 or max(size) > 2.5 * native:
        return [
            f"{width}x{height} is much larger than the {native}x{native} this model was trained on; subjects may repeat"
        ]
    if width * height < (native / 2) ** 2 or max(size) < native / 2:
        return [
            f"{width}x{height} is much smaller than the {native}x{native} this model was trained on; expect poor images"
        ]
    if max(size) > 3 * min(size):
        return [f"{width}x{height} is a shape this model was not trained on; subjects may repeat along it"]
    return []


def fit_reference(image: Image.Image, fit: ReferenceFit) -> Image.Image:
    """Return an image as the reference that its family says: resized, and cut around its center."""
    resized = image if image.size == fit.resized else image.resize(fit.resized, Image.Resampling.LANCZOS)
    left, top, width, height = fit.crop
    return resized.crop((left, top, left + width, top + height))


def to_tensor(image: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    """Return an image as (1, 3, height, width) in -1..1."""
    resized = image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)
    values = np.asarray(resized, dtype=np.float32) / 255.0
    return torch.from_numpy(values)[None].permute(0, 3, 1, 2) * 2.0 - 1.0


def mask_tensor(mask: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    """Return a mask as (1, 1, height, width), one where to repaint."""
    resized = mask if mask.size == size else mask.resize(size, Image.Resampling.NEAREST)
    return (torch.from_numpy(np.asarray(resized, dtype=np.float32)) >= 128).float()[None, None]


def to_image(values: torch.Tensor) -> Image.Image:
    """Return the first image of a batch in -1..1."""
    pixels = (values[0].float().cpu() / 2 + 0.5).nan_to_num(0.0).clamp(0, 1).permute(1, 2, 0)
    return Image.fromarray((pixels.numpy() * 255).round().astype(np.uint8))


def paste(new: Image.Image, old: Image.Image, mask: Image.Image, feather: int) -> Image.Image:
    """Return ``new`` where the mask is white, ``old`` bit for bit where it is black."""
    alpha = np.asarray(mask, dtype=np.float32) / 255.0
    if feather:
        blurred = np.asarray(mask.filter(ImageFilter.GaussianBlur(feather / 2)), dtype=np.float32) / 255.0
        alpha = np.clip(2.0 * blurred - 1.0, 0.0, 1.0) * (alpha > 0)
    share = alpha[..., None]
    resized = new if new.size == old.size else new.resize(old.size, Image.Resampling.LANCZOS)
    mixed = np.asarray(resized, np.float32) * share + np.asarray(old, np.float32) * (1.0 - share)
    return Image.fromarray(mixed.round().astype(np.uint8))


def is_blank(image: Image.Image) -> bool:
    """Return whether all pixels have one color."""
    return all(low == high for low, high in (band.getextrema() for band in image.split()))
