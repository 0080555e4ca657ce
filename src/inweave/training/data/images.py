"""A picture as a step shows it: upright, on white, resized, cut, mirrored, with its mask.

file ──upright──► RGB on white ──resize──► covers its bucket ──cut──► the bucket ──mirror──► -1..1
mask ─────────────────────────────────────── the same ─────────────────────────────────────► 0..1

Sixteen-bit pictures and masks are scaled to eight; a mask is turned as the reader of the set found it to lie. A cut that
moves falls on one of a few places that the picture's own hash names, so that each can be encoded once.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from inweave.training.config.schema import TrainConfig
from inweave.training.data.buckets import Placement
from inweave.training.data.reader import Example
from inweave.training.data.report import grey

Box = tuple[int, int, int, int]  # left, top, width, height

CROPS = 4  # places a randomly cropped picture is cut at
_WAYS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
_TURNS = {number: Image.Transpose[way] for number, way in enumerate(_WAYS, 2)}  # by EXIF's numbers


def opened(
    example: Example, place: Placement, cut: Box, *, flip: bool, masked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """((3, height, width) in -1..1, (height, width) in 0..1); without a mask all of it is open."""
    left, top, width, height = cut
    box = (left, top, left + width, top + height)
    with Image.open(example.path) as file:
        picture, alpha = _on_white(ImageOps.exif_transpose(file))
    mask = _mask(example, alpha, picture.size) if masked else None
    shown = picture.resize(place.resized, Image.Resampling.LANCZOS).crop(box)
    open_part = mask.resize(place.resized).crop(box) if mask is not None else Image.new("L", shown.size, 255)
    if flip:
        shown, open_part = ImageOps.mirror(shown), ImageOps.mirror(open_part)
    pixels = torch.from_numpy(np.asarray(shown, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)
    return pixels, torch.from_numpy(np.asarray(open_part, dtype=np.float32) / 255)


def cut_of(place: Placement, number: int, key: str) -> Box:
    """Where a picture is cut: in its middle (0), or at one of a few places its own hash decides."""
    if number == 0:
        return place.crop
    _, _, width, height = place.crop
    digest = hashlib.sha256(f"{key}/{number}".encode()).digest()
    spare_x, spare_y = place.resized[0] - width, place.resized[1] - height
    return digest[0] * spare_x // 255, digest[1] * spare_y // 255, width, height


def is_masked(config: TrainConfig, example: Example) -> bool:
    """Whether the loss of a picture heeds its mask."""
    return config.masked_loss or (example.subset.alpha_mask and example.mask is not None)


def mask_key(example: Example) -> str:
    """What of a picture's mask decides numbers: the content of its file and how it is read, or that it is alpha."""
    if not isinstance(example.mask, Path):
        return str(example.mask)
    found = hashlib.sha256(example.mask.read_bytes()).hexdigest()
    with Image.open(example.mask) as file:  # caches from before deep masks were scaled, and any turned, hold others
        found += "/16" if file.mode.startswith("I") else ""
    return found + (f"/{example.mask_turn}" if example.mask_turn != 1 else "")


def _on_white(upright: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """(RGB, alpha if there is one)."""
    if upright.mode.startswith("I"):
        return grey(upright).convert("RGB"), None
    if not upright.has_transparency_data:
        return upright.convert("RGB"), None
    clear = upright.convert("RGBA")
    ground = Image.new("RGB", upright.size, "white")
    ground.paste(clear, mask=clear.getchannel("A"))
    return ground, clear.getchannel("A")


def _mask(example: Example, alpha: Image.Image | None, size: tuple[int, int]) -> Image.Image | None:
    if isinstance(example.mask, Path):
        with Image.open(example.mask) as file:
            levels = grey(file)
        turn = _TURNS.get(example.mask_turn)
        return (levels if turn is None else levels.transpose(turn)).resize(size)
    return alpha if example.mask == "alpha" else None
