"""Images from prompts and from other images.

POST /sdapi/v1/txt2img, /sdapi/v1/img2img

As in A1111, unknown fields are ignored and any field may be null. Settings that a client leaves out take the model's
own values. What becomes of fields that cannot be honored is in `fields`; a LoRA that is unknown or does not fit is an
error, unless the request says on_mismatch = "warn".
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from inweave.errors import ConfigError, MissingError, Problem
from inweave.serve.api.a1111.fields import (
    FIELD_NAMES,
    echoed,
    ignored_fields,
    image_fields,
    number,
    refuse_unsupported,
    switch,
    whole_number,
)
from inweave.serve.api.a1111.hires import second_pass
from inweave.serve.api.a1111.images import Inpainting, MaskSettings, prepare_inpainting
from inweave.serve.api.a1111.info import generation_info
from inweave.serve.api.a1111.options import SdOptions
from inweave.serve.api.a1111.progress import remember_task, sdapi_client
from inweave.serve.api.a1111.requests import Img2Img, Txt2Img, image_body
from inweave.serve.api.context import service_of
from inweave.serve.api.openapi import MAY_BE_BUSY, json_body_of
from inweave.serve.api.resize import MAX_SIDE, resize_input
from inweave.serve.api.waiting import wait_or_cancel
from inweave.serve.jobs.image_request import ImageRequest
from inweave.serve.jobs.job import Job
from inweave.serve.service import Service

router = APIRouter(prefix="/sdapi/v1")
LIVE_PREVIEW_EVERY = 5
_TXT2IMG = {"prompt": "a red apple <lora:pixel:0.8>", "steps": 8}
_IMG2IMG = {"prompt": "a pear", "init_images": ["iVBORw0KGgo..."]}


@router.post("/txt2img", responses=MAY_BE_BUSY, openapi_extra=json_body_of(Txt2Img, _TXT2IMG))
async def txt2img(request: Request) -> JSONResponse:
    body = await image_body(request)
    return await _generate(request, body, {"operation": "image_generation"}, [], hires=True)


@router.post("/img2img", responses=MAY_BE_BUSY, openapi_extra=json_body_of(Img2Img, _IMG2IMG))
async def img2img(request: Request) -> JSONResponse:
    body = await image_body(request)
    service = service_of(request)
    images = body.get("init_images") or []
    if not isinstance(images, list) or not images or not isinstance(images[0], str):
        raise MissingError("Init image not found")
    if len(images) > 1:
        raise ConfigError(Problem("init_images", f"one image is expected, got {len(images)}"))
    image = await service.images.read(images[0], "init_images")
    size = (whole_number(body, "width"), whole_number(body, "height"))
    if max(side or 0 for side in size) > MAX_SIDE:  # before the image is made that large
        raise ConfigError(f"width, height: at most {MAX_SIDE} pixels")
    warnings: list[str] = []
    mode = whole_number(body, "resize_mode", 3) or 0
    if mode == 3:
        warnings.append("resize_mode 3 (latent upscale) has no effect here; the image was stretched")
    strength = number(body, "denoising_strength")
    fields: dict[str, Any] = {"operation": "image_transform", "strength": 0.75 if strength is None else strength}
    if not body.get("mask"):
        resized = await asyncio.to_thread(resize_input, image, size, mode)
        return await _generate(request, body, fields | {"image": _base64(resized)}, warnings)
    settings = _mask_settings(body, warnings)
    mask = await service.images.read(str(body["mask"]), "mask")
    inpainting = await asyncio.to_thread(prepare_inpainting, image, mask, size, mode, settings)
    fields |= {"operation": "image_inpaint", "image": _base64(inpainting.image), "mask_image": _base64(inpainting.mask)}
    fields["feather"] = settings.blur
    return await _generate(request, body, fields, warnings, inpainting)


def _mask_settings(body: Mapping[str, Any], warnings: list[str]) -> MaskSettings:
    across, down = whole_number(body, "mask_blur_x", 256), whole_number(body, "mask_blur_y", 256)
    blur = whole_number(body, "mask_blur", 256)
    if blur is None:
        blur = across if across is not None else down if down is not None else 4
        if across is not None and down is not None and across != down:
            warnings.append(f"mask_blur_y: a blur is the same in both directions here; {blur} was used")
    fill = whole_number(body, "inpainting_fill", 3) or 0
    if fill > 1:
        warnings.append(f"inpainting_fill {fill} (latent) has no effect here; the colors around the mask were used")
    padding = whole_number(body, "inpaint_full_res_padding") or 0
    return MaskSettings(
        switch(body, "inpainting_mask_invert", False), blur, fill != 1, switch(body, "inpaint_full_res", True), padding
    )


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


async def _generate(
    request: Request,
    body: dict[str, Any],
    fields: dict[str, Any],
    warnings: list[str],
    inpainting: Inpainting | None = None,
    hires: bool = False,
) -> JSONResponse:
    service = service_of(request)
    started = time.perf_counter()
    options: SdOptions = request.app.state.sd_options
    refuse_unsupported(body)
    warnings += [*ignored_fields(body), *(f"option {line}" for line in options.without_effect)]
    fields |= image_fields(body, warnings)
    if hires:
        fields |= second_pass(body, fields)
    if fields["seed"] == -1:  # drawn here, so that the answer has it also if the job is interrupted
        fields["seed"] = secrets.randbits(32)
    chosen = options.override(body.get("override_settings") or {}, service.models)
    fields["model"] = chosen.model
    if chosen.clip_skip is not None:
        fields.setdefault("clip_skip", chosen.clip_skip)
    if body.get("override_settings_restore_afterwards") is False:
        request.app.state.sd_options = chosen
    fields["preview_every"] = LIVE_PREVIEW_EVERY
    try:
        job = await service.submit_image(ImageRequest.parse(fields), client=sdapi_client(request))
    except ConfigError as error:
        raise error.renamed(FIELD_NAMES) from None
    if isinstance(task := body.get("force_task_id"), str):
        remember_task(request, task, job)
    ended = await wait_or_cancel(request, service, job)
    images = await _images(service, ended, inpainting)
    answer = {
        "images": images if switch(body, "send_images", True) else [],
        "parameters": echoed(body),
        "info": json.dumps(generation_info(ended, warnings, whole_number(body, "batch_size") or 1)),
        "loras": (ended.result or {}).get("loras", []),
        "warnings": [*warnings, *(ended.result or {}).get("warnings", []), *ended.request.get("warnings", [])],
        "job_id": job.id,
    }
    return JSONResponse(answer, headers={"X-Process-Time": f"{time.perf_counter() - started:.4f}"})


async def _images(service: Service, job: Job, inpainting: Inpainting | None) -> list[str]:
    """Return the results; of a job that was interrupted its last preview, like A1111."""
    if job.state == "done":
        images = await service.jobs.images(job)
        if inpainting is not None:
            images = [await asyncio.to_thread(inpainting.restore, content) for content in images]
        return [_base64(content) for content in images]
    events = await service.jobs.events(job.id)
    previews = [event.data["image"] for event in events if event.type == "preview"]
    return previews[-1:]
