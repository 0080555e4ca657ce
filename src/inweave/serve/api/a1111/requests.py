"""Bodies of A1111's API.

Every field may be null, and unknown fields are ignored. The models name the fields that work and those that have no
effect on an image anywhere; values are checked where they are used, which is more lenient: 20.0 is a number of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import Request
from pydantic import BaseModel, Field

from inweave.errors import ConfigError, Problem
from inweave.generate.infotext import from_infotext
from inweave.serve.api.json_body import json_body

MAX_INFOTEXT = 100_000
_IMAGE = "an image in base64, a data: address, or the id of an upload"


class Txt2Img(BaseModel):
    """Images from a prompt."""

    prompt: str | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    subseed: int | None = None
    steps: int | None = None
    cfg_scale: float | None = None
    width: int | None = None
    height: int | None = None
    batch_size: int | None = None
    n_iter: int | None = None
    sampler_name: str | None = None
    sampler_index: str | None = None
    scheduler: str | None = None
    clip_skip: int | None = None
    loras: list[str | dict[str, Any]] | None = Field(default=None, description="ours; tags in the prompt work too")
    on_mismatch: Literal["error", "warn"] | None = None
    override_settings: dict[str, Any] | None = None
    override_settings_restore_afterwards: bool | None = None
    disable_extra_networks: bool | None = None
    send_images: bool | None = None
    force_task_id: str | None = None
    infotext: str | None = Field(default=None, max_length=MAX_INFOTEXT)
    styles: list[str] | None = Field(default=None, description="names of `prompt-styles`")
    upscale: dict[str, Any] | None = Field(default=None, description="ours: the second pass, as in /v1/jobs")
    outpaint: dict[str, Any] | None = Field(default=None, description="ours: pixels to add to each side of the image")
    grid: list[str] | None = Field(default=None, description="ours: axes of a sheet")
    template: dict[str, Any] | None = Field(default=None, description="ours: what the prompts were resolved from")
    alwayson_scripts: dict[str, Any] | None = None
    script_name: str | None = None
    script_args: list[Any] | None = None
    comments: dict[str, Any] | None = None
    do_not_save_samples: bool | None = None
    do_not_save_grid: bool | None = None
    denoising_strength: float | None = None
    refiner_switch_at: float | None = None
    firstphase_width: int | None = None
    firstphase_height: int | None = None
    enable_hr: bool | None = Field(default=None, description="enlarge each image and paint it again (hires fix)")
    hr_scale: float | None = None
    hr_upscaler: str | None = None
    hr_second_pass_steps: int | None = None
    hr_resize_x: int | None = None
    hr_resize_y: int | None = None
    hr_checkpoint_name: str | None = None
    hr_sampler_name: str | None = None
    hr_scheduler: str | None = None
    hr_prompt: str | None = None
    hr_negative_prompt: str | None = None


class Img2Img(Txt2Img):
    """Images from another one, or from a part of it."""

    init_images: list[str] = Field(min_length=1, max_length=1, description=_IMAGE)
    mask: str | None = Field(default=None, description=_IMAGE)
    resize_mode: Literal[0, 1, 2, 3] | None = None
    mask_blur: int | None = None
    mask_blur_x: int | None = None
    mask_blur_y: int | None = None
    inpainting_fill: Literal[0, 1, 2, 3] | None = None
    inpaint_full_res: bool | None = None
    inpaint_full_res_padding: int | None = None
    inpainting_mask_invert: bool | Literal[0, 1] | None = None
    include_init_images: bool | None = None


class Extras(BaseModel):
    """How images are enlarged."""

    resize_mode: Literal[0, 1] | None = None
    upscaling_resize: float | None = Field(default=None, description="times both sides; 2 by default")
    upscaling_resize_w: int | None = None
    upscaling_resize_h: int | None = None
    upscaling_crop: bool | None = None
    upscaler_1: str | None = Field(default=None, description="a name of `upscalers`")


class ExtrasSingle(Extras):
    """An image to enlarge."""

    image: str = Field(description=_IMAGE)


class ExtrasFile(BaseModel):
    """One of several images to enlarge."""

    data: str = Field(description=_IMAGE)
    name: str | None = None


class ExtrasBatch(Extras):
    """Images to enlarge."""

    imageList: list[ExtrasFile] = Field(min_length=1)


class PngInfo(BaseModel):
    """An image whose settings are read."""

    image: str = Field(description="in base64, or a data: address")


class Options(BaseModel):
    """Settings of the web UI that this worker follows."""

    sd_model_checkpoint: str | None = None
    CLIP_stop_at_last_layers: int | None = None


class TaskProgress(BaseModel):
    """A task whose progress is read."""

    id_task: str
    id_live_preview: int | None = None
    live_preview: bool | None = None


async def object_body(request: Request) -> Mapping[str, Any]:
    """Return the JSON object of a request; raise ConfigError if it is not one."""
    body = await json_body(request)
    if not isinstance(body, Mapping):
        raise ConfigError("expected a JSON object")
    return body


async def image_body(request: Request) -> dict[str, Any]:
    """Return the fields of a request that are not null, those of its infotext included."""
    body = await object_body(request)
    fields = {name: value for name, value in body.items() if value is not None and name not in ("url", "auth")}
    if isinstance(text := fields.get("infotext"), str):
        if len(text) > MAX_INFOTEXT:
            raise ConfigError(Problem("infotext", f"longer than {MAX_INFOTEXT:,} characters"))
        theirs = {"guidance": "cfg_scale", "sampler": "sampler_name", "schedule": "scheduler"}
        fields = {theirs.get(name, name): value for name, value in from_infotext(text).items()} | fields
    return fields
