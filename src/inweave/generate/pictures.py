"""Pictures in and out: any size in, multiples of the model's patch inside, the same size out.

mask     white is repainted; anything lighter than half counts as white
feather  alpha = 2 * blurred mask - 1, held to 0..1: new fades into old inside the mask only, so every pixel
         outside keeps its bits
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps, UnidentifiedImageError

from inweave.errors import RequestError

MAX_PIXELS = 64 * 1024 * 1024
Picture = str | os.PathLike[str] | Image.Image


def open_picture(picture: Picture, what: str) -> Image.Image:
    """A picture from a file or as it is, upright and in RGB."""
    if isinstance(picture, Image.Image):
        found = picture
    else:
        try:
            with Image.open(Path(picture)) as file:
                if file.width * file.height > MAX_PIXELS:
                    raise RequestError(
                        f"{what} {picture}: {file.width}x{file.height} is larger than {MAX_PIXELS:,} pixels"
                    )
                found = file.copy()
        except FileNotFoundError:
            raise RequestError(f"{what} {picture}: no such file") from None
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise RequestError(f"{what} {picture}: not a picture that can be read: {error}") from None
    found = ImageOps.exif_transpose(found)
    if found.mode in ("RGBA", "LA", "PA") or "transparency" in found.info:
        ground = Image.new("RGBA", found.size, "white")
        ground.alpha_composite(found.convert("RGBA"))
        found = ground
    return found.convert("RGB")


def open_mask(picture: Picture, size: tuple[int, int]) -> Image.Image:
    """A mask of black and white only, of the picture's ``size``."""
    mask = open_picture(picture, "mask").convert("L")
    if mask.size != size:
        mask = mask.resize(size, Image.Resampling.NEAREST)
    return mask.point(lambda value: 255 if value >= 128 else 0)


def working_size(picture: tuple[int, int], native: int, patch: int) -> tuple[int, int]:
    """Where to work on a picture: its own size, or the model's area where it is much larger than that."""
    width, height = picture
    limit = (1.5 * native) ** 2
    scale = (native * native / (width * height)) ** 0.5 if width * height > limit else 1.0
    scale = max(scale, 64 / min(width, height))
    return tuple(min(max(round(side * scale / patch) * patch, 64), 4096) for side in (width, height))  # type: ignore[return-value]


def to_tensor(picture: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    """(1, 3, height, width) in -1..1."""
    fitted = picture if picture.size == size else picture.resize(size, Image.Resampling.LANCZOS)
    numbers = np.asarray(fitted, dtype=np.float32) / 255.0
    return torch.from_numpy(numbers)[None].permute(0, 3, 1, 2) * 2.0 - 1.0


def mask_tensor(mask: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    """(1, 1, height, width), one where to repaint."""
    fitted = mask if mask.size == size else mask.resize(size, Image.Resampling.NEAREST)
    return (torch.from_numpy(np.asarray(fitted, dtype=np.float32)) >= 128).float()[None, None]


def to_picture(numbers: torch.Tensor) -> Image.Image:
    """The first picture of a batch in -1..1."""
    pixels = (numbers[0].float().cpu() / 2 + 0.5).clamp(0, 1).permute(1, 2, 0)
    return Image.fromarray((pixels.numpy() * 255).round().astype(np.uint8))


def pasted(new: Image.Image, old: Image.Image, mask: Image.Image, feather: int) -> Image.Image:
    """``new`` where the mask is white, ``old`` bit for bit where it is black."""
    alpha = np.asarray(mask, dtype=np.float32) / 255.0
    if feather:
        blurred = np.asarray(mask.filter(ImageFilter.GaussianBlur(feather / 2)), dtype=np.float32) / 255.0
        alpha = np.clip(2.0 * blurred - 1.0, 0.0, 1.0) * (alpha > 0)
    share = alpha[..., None]
    fresh = new if new.size == old.size else new.resize(old.size, Image.Resampling.LANCZOS)
    mixed = np.asarray(fresh, np.float32) * share + np.asarray(old, np.float32) * (1.0 - share)
    return Image.fromarray(mixed.round().astype(np.uint8))
