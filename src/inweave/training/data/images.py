"""Images and masks: probed when a dataset is read, loaded to be encoded.

    file ──upright──► RGB on white ──resize──► covers its bucket ──crop──► the bucket ──flip──► -1..1
    mask ─────────────────────────────────────── the same ────────────────────────────────────► 0..1

    probe   decoded to the last pixel and turned upright; the hash is that of 8-bit RGBA pixels, so the same image in
            two lossless files is one image
    mask    grayscale, in the shape of its image: sides within 1 % or a pixel of it. A mask of exactly the size that an
            image rotated by EXIF has in its file is rotated with it

Of an animation or a file of several pages the first frame is used. 16-bit images and masks are scaled to 8 bits. A
random crop is one of a few positions chosen by the image's own hash, so that each of them can be encoded once. torch is
imported in the functions that make tensors: checking a dataset does not need it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from inweave.errors import FormatError
from inweave.files.images import DATASET_FORMATS, has_more_frames, open_image, read_image
from inweave.files.paths import printable_path
from inweave.files.reading import read_bytes
from inweave.models.families.references import ReferenceFit
from inweave.training.config.schema import TrainConfig
from inweave.training.data.buckets import BucketFit
from inweave.training.data.types import Example

if TYPE_CHECKING:
    import torch

Box = tuple[int, int, int, int]  # left, top, width, height

MAX_FILE = 2**30  # bytes of a mask
RANDOM_CROPS = 4  # positions per image
_TRANSPOSE_NAMES = (
    "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90",
)  # fmt: skip
_TRANSPOSES = {number: Image.Transpose[name] for number, name in enumerate(_TRANSPOSE_NAMES, 2)}  # by EXIF orientation


class ImageInfo(NamedTuple):
    """Properties of an image or a mask."""

    size: tuple[int, int]  # upright
    sha256: str  # of all pixels
    has_alpha: bool
    black: bool  # the mask it is, or has in its alpha channel, is black everywhere
    stored_size: tuple[int, int]  # in the file, before it is turned upright
    orientation: int  # EXIF; 1: upright already
    has_more_frames: bool = False  # an animation or several pages, of which the first is used


def probe_image(path: Path, mask: bool = False) -> ImageInfo | str:
    """Decode a file to the last pixel; returns the reason as text if it cannot be read."""
    try:
        upright, stored_size, orientation = read_image(path, formats=DATASET_FORMATS)
        if upright.mode == "F":
            return "its pixels are floating-point numbers, whose range is not known; save it with 8 or 16 bits"
        deep = upright.mode.startswith(("I", "F"))  # more than 8 bits: converting would merge different images
        pixels = upright if deep else upright.convert("RGBA")
        digest = hashlib.sha256(f"{pixels.mode} {pixels.width}x{pixels.height} ".encode())
        digest.update(pixels.tobytes())
        alpha = upright.has_transparency_data
        levels = to_grayscale(upright) if mask else pixels.getchannel("A") if alpha and not deep else None
        black = levels is not None and levels.getextrema() == (0, 0)
        frames = has_more_frames(path, DATASET_FORMATS)
        return ImageInfo(pixels.size, digest.hexdigest(), alpha, black, stored_size, orientation, frames)
    except FormatError as error:
        return str(error).removeprefix(f"{printable_path(path)}: ")
    except Exception as error:  # a palette or a mode that cannot be converted
        return f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()


def to_grayscale(image: Image.Image) -> Image.Image:
    """Convert to 8 bits; of 16 bits the upper ones, since a plain conversion would clip everything above 255."""
    if not image.mode.startswith("I"):
        return image.convert("L")
    deep = np.asarray(image).astype(np.int64)
    return Image.fromarray((deep.clip(0, 65535) >> 8).astype(np.uint8))


def mask_orientation(mask: ImageInfo, image: ImageInfo) -> int | None:
    """Return the EXIF orientation that aligns a mask with its image; None if their shapes differ."""
    if mask.orientation == 1 and mask.stored_size == image.stored_size != image.size:  # made from the pixels as stored
        return image.orientation
    (across, down), (width, height) = mask.size, image.size
    ours, theirs = across * height, down * width
    rounding = abs(ours - theirs) < max(across, down, width, height)  # less than a pixel of one of the four sides
    return mask.orientation if rounding or max(ours, theirs) <= 1.01 * min(ours, theirs) else None


def load_image(
    example: Example, place: BucketFit, crop: Box, *, flip: bool, masked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (pixels (3, height, width) in -1..1, mask (height, width) in 0..1); without a mask all of it is 1."""
    import torch

    left, top, width, height = crop
    box = (left, top, left + width, top + height)
    image, alpha = _on_white(read_image(example.path, formats=DATASET_FORMATS).image)
    levels = _load_mask(example, alpha, image.size) if masked else None
    image = image.resize(place.resized, Image.Resampling.LANCZOS).crop(box)
    mask = levels.resize(place.resized).crop(box) if levels is not None else Image.new("L", image.size, 255)
    if flip:
        image, mask = ImageOps.mirror(image), ImageOps.mirror(mask)
    pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)
    return pixels, torch.from_numpy(np.asarray(mask, dtype=np.float32) / 255)


def load_reference(path: Path, fit: ReferenceFit, *, flip: bool) -> torch.Tensor:
    """Return a reference image as (3, height, width) in -1..1."""
    import torch

    left, top, width, height = fit.crop
    image = open_reference(path).resize(fit.resized, Image.Resampling.LANCZOS)
    image = image.crop((left, top, left + width, top + height))
    image = ImageOps.mirror(image) if flip else image
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)


def open_reference(path: Path, *, flip: bool = False) -> Image.Image:
    """Return a reference image upright, on white."""
    image, _ = _on_white(read_image(path, formats=DATASET_FORMATS).image)
    return ImageOps.mirror(image) if flip else image


def crop_box(place: BucketFit, number: int, key: str) -> Box:
    """Return the center crop (0), or one of a few positions chosen by the image's own hash."""
    if number == 0:
        return place.crop
    _, _, width, height = place.crop
    digest = hashlib.sha256(f"{key}/{number}".encode()).digest()
    spare_x, spare_y = place.resized[0] - width, place.resized[1] - height
    return digest[0] * spare_x // 255, digest[1] * spare_y // 255, width, height


def uses_mask(config: TrainConfig, example: Example) -> bool:
    """Return whether the loss of an image is masked."""
    return config.masked_loss or (example.subset.alpha_mask and example.mask is not None)


def mask_key(example: Example) -> str:
    """Return the cache key of an image's mask: the content of its file and how it is read, or "alpha"."""
    if not isinstance(example.mask, Path):
        return str(example.mask)
    key = hashlib.sha256(read_bytes(example.mask, MAX_FILE)).hexdigest()
    with open_image(example.mask) as file:
        key += "/16" if file.mode.startswith("I") else ""
    return key + (f"/{example.mask_orientation}" if example.mask_orientation != 1 else "")


def _on_white(upright: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return (RGB on white, alpha if there is one)."""
    if upright.mode.startswith("I"):
        return to_grayscale(upright).convert("RGB"), None
    if not upright.has_transparency_data:
        return upright.convert("RGB"), None
    rgba = upright.convert("RGBA")
    background = Image.new("RGB", upright.size, "white")
    background.paste(rgba, mask=rgba.getchannel("A"))
    return background, rgba.getchannel("A")


def _load_mask(example: Example, alpha: Image.Image | None, size: tuple[int, int]) -> Image.Image | None:
    if isinstance(example.mask, Path):
        levels = to_grayscale(read_image(example.mask, upright=False).image)
        transpose = _TRANSPOSES.get(example.mask_orientation)
        return (levels if transpose is None else levels.transpose(transpose)).resize(size)
    return alpha if example.mask == "alpha" else None
