"""Settings that make an image larger: `upscale`, which enlarges what is in it, and `outpaint`, which adds to its sides.

upscale    first image ──upscaler──► its target size ──image to image at `strength`──► the result
outpaint   canvas = the image with `left`, `top`, `right` and `bottom` pixels more, painted by inpainting
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import ConfigDict, Field, field_validator, model_validator

from inweave.checked import CheckedModel
from inweave.models.sampler_names import sampler_name, sampler_refusal, schedule_name, schedule_refusal
from inweave.models.samplers import SAMPLERS, SCHEDULES

MAX_SIDE = 4096
LATENT = "latent"
#: how latents are interpolated, by the name of the upscaler: torch's mode, and whether it is antialiased
LATENT_MODES = {
    LATENT: ("bilinear", False), "latent-antialiased": ("bilinear", True), "latent-bicubic": ("bicubic", False),
    "latent-bicubic-antialiased": ("bicubic", True), "latent-nearest": ("nearest", False),
    "latent-nearest-exact": ("nearest-exact", False),
}  # fmt: skip
#: upscalers of pixels that need no file
PIXEL_MODES = ("lanczos", "bicubic", "nearest")
#: names in A1111 and its relatives
LABELS = {
    "lanczos": "Lanczos", "bicubic": "Bicubic", "nearest": "Nearest", LATENT: "Latent",
    "latent-antialiased": "Latent (antialiased)", "latent-bicubic": "Latent (bicubic)",
    "latent-bicubic-antialiased": "Latent (bicubic antialiased)", "latent-nearest": "Latent (nearest)",
    "latent-nearest-exact": "Latent (nearest-exact)",
}  # fmt: skip
_OURS = {label.lower(): name for name, label in LABELS.items()} | {"none": "lanczos"}


def upscaler_name(text: str) -> str:
    """Return the name of an upscaler by any name in use; that of a file stays unchanged."""
    return _OURS.get(text.strip().lower(), text.strip())


def upscaler_label(name: str) -> str:
    """Return the name of an upscaler in other programs."""
    return LABELS.get(name, name)


def made_steps(steps: int, strength: float) -> int:
    """Return how many of ``steps`` image to image makes."""
    return max(1, int(steps * strength)) if strength else 0


def steps_for(made: int, strength: float) -> int:
    """Return the steps of which image to image makes ``made``, as A1111 counts those of its second pass."""
    return min(150, math.ceil(made / strength - 1e-9)) if strength else made


class UpscalePass(CheckedModel):
    """How every image is enlarged, and painted again at that size (hires fix)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scale: Annotated[float, Field(gt=1, le=8)] | None = Field(
        default=None, description="times both sides; 2 if neither width nor height is given"
    )
    width: Annotated[int, Field(ge=64, le=MAX_SIDE)] | None = Field(
        default=None, description="pixels of the result; with both sides given it is cropped to their shape"
    )
    height: Annotated[int, Field(ge=64, le=MAX_SIDE)] | None = Field(
        default=None, description="pixels of the result; one side alone keeps the shape"
    )
    upscaler: Annotated[str, Field(min_length=1, max_length=300)] = Field(
        default="lanczos",
        description=f"{', '.join((*PIXEL_MODES, *LATENT_MODES))}, or the file of an ESRGAN-type network",
    )
    strength: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="denoising strength at the new size; 0 only enlarges. Default: 0.4, of latents 0.6, and 0 for "
        "models of images below 256 pixels, which paint no details of larger ones",
    )
    steps: Annotated[int, Field(ge=1, le=150)] | None = Field(
        default=None, description="sampling steps at the new size, of which `strength` are made; default: the same"
    )
    sampler: str | None = Field(default=None, description="at the new size; default: the same")
    schedule: str | None = Field(default=None, description="at the new size; default: the same")
    tile: Annotated[int, Field(ge=0, le=MAX_SIDE)] | None = Field(
        default=None,
        description="side of the tiles that are painted one by one, so that memory follows a tile; 0: the image as a "
        "whole; default: tiles of twice the model's own size for images that are larger",
    )

    @field_validator("sampler")
    @classmethod
    def _known_sampler(cls, value: str | None) -> str | None:
        if value is not None and value not in SAMPLERS:
            raise ValueError(sampler_refusal(value))
        return value

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value: str | None) -> str | None:
        if value is not None and value not in SCHEDULES:
            raise ValueError(schedule_refusal(value))
        return value

    @model_validator(mode="before")
    @classmethod
    def _names_of_others(cls, data: object) -> object:
        """Accept samplers and schedules by any name in use."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if isinstance(data.get("upscaler"), str):
            data["upscaler"] = upscaler_name(data["upscaler"])
        if isinstance(data.get("sampler"), str):
            data["sampler"], schedule = sampler_name(data["sampler"])
            if schedule is not None and data.get("schedule") is None:
                data["schedule"] = schedule
        if isinstance(data.get("schedule"), str):
            data["schedule"] = schedule_name(data["schedule"])
        return data

    @model_validator(mode="after")
    def _one_size(self) -> UpscalePass:
        if self.scale is not None and (self.width or self.height):
            raise ValueError("give a scale, or the width and height of the result, not both")
        return self

    @property
    def is_latent(self) -> bool:
        """Whether latents are enlarged, and not the image."""
        return self.upscaler in LATENT_MODES

    def strength_for(self, native: int) -> float:
        """Return the strength; ``native``: the side of the images the model was trained on."""
        if self.strength is not None:
            return self.strength
        return 0.6 if self.is_latent else 0.4 if native >= 256 else 0.0

    def size_of(self, size: tuple[int, int], patch: int = 1) -> tuple[int, int]:
        """Return the size of the result for an image, in multiples of ``patch`` pixels."""
        width, height = size
        if self.width or self.height:
            across = self.width or round(width * (self.height or height) / height)
            down = self.height or round(height * (self.width or width) / width)
        else:
            across, down = (round(side * (self.scale or 2.0)) for side in size)
        return max(patch, across // patch * patch), max(patch, down // patch * patch)


class Outpaint(CheckedModel):
    """By how many pixels an image is extended on each side, and over how many the new part fades into the old."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    left: Annotated[int, Field(ge=0, le=MAX_SIDE)] = 0
    top: Annotated[int, Field(ge=0, le=MAX_SIDE)] = 0
    right: Annotated[int, Field(ge=0, le=MAX_SIDE)] = 0
    bottom: Annotated[int, Field(ge=0, le=MAX_SIDE)] = 0
    blend: Annotated[int, Field(ge=0, le=256)] = Field(
        default=16, description="pixels of the image, along its border, that are painted again and blended"
    )

    @model_validator(mode="after")
    def _somewhere(self) -> Outpaint:
        if not (self.left or self.top or self.right or self.bottom):
            raise ValueError("name a side and its pixels, such as right=128")
        return self

    def size_of(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the size of the canvas for an image."""
        return size[0] + self.left + self.right, size[1] + self.top + self.bottom
