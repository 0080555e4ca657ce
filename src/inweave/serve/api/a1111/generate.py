"""AUTOMATIC1111's API below /sdapi/v1, as far as clients use it.

Unknown fields are no errors and every field may be null, as there. Settings that a client leaves out take the model's own
values. What cannot be honored (hires fix, face restoration, scripts, ...) is named in `info` and in `warnings`; a LoRA that is
unknown or does not fit is an error, unless the request says on_mismatch = "warn".
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from inweave.errors import ConfigError, MissingError, Problem
from inweave.generate.infotext import from_infotext
from inweave.serve.api.a1111.fields import (
    FIELD_NAMES,
    echoed,
    ignored_fields,
    image_fields,
    number,
    switch,
    whole_number,
)
from inweave.serve.api.a1111.images import Inpainting, MaskSettings, prepare_inpainting, resize_input
from inweave.serve.api.a1111.info import generation_info
from inweave.serve.api.a1111.options import SdOptions
from inweave.serve.api.a1111.progress import remember_task
from inweave.serve.api.json_body import json_body
from inweave.serve.api.native.jobs import client_of, service_of
from inweave.serve.api.waiting import finished_images, wait
from inweave.serve.jobs.failures import error_of
from inweave.serve.jobs.image_request import ImageRequest, named_as
from inweave.serve.jobs.job import Job
from inweave.serve.service import Service

router = APIRouter(prefix="/sdapi/v1")
LIVE_PREVIEW_EVERY = 5
MAX_SIDE = 4096


@router.post("/txt2img")
async def txt2img(request: Request) -> JSONResponse:
    body = await _fields(request)
    return await _generate(request, body, {"operation": "image_generation"}, [])


@router.post("/img2img")
async def img2img(request: Request) -> JSONResponse:
    body = await _fields(request)
    service = service_of(request)
    images = body.get("init_images") or []
    if not isinstance(images, list) or not images or not isinstance(images[0], str):
        raise MissingError("Init image not found")
    if len(images) > 1:
        raise ConfigError(Problem("init_images", f"one picture is expected, got {len(images)}"))
    image = await service.picture(images[0], "init_images")
    size = (whole_number(body, "width"), whole_number(body, "height"))
    if max(side or 0 for side in size) > MAX_SIDE:  # before the picture is made that large
        raise ConfigError(f"width, height: at most {MAX_SIDE} pixels")
    warnings: list[str] = []
    mode = whole_number(body, "resize_mode", 3) or 0
    if mode == 3:
        warnings.append("resize_mode 3 (latent upscale) has no effect here; the picture was stretched")
    strength = number(body, "denoising_strength")
    fields: dict[str, Any] = {"operation": "image_transform", "strength": 0.75 if strength is None else strength}
    if not body.get("mask"):
        resized = await asyncio.to_thread(resize_input, image, size, mode)
        return await _generate(request, body, fields | {"image": _base64(resized)}, warnings)
    settings = _mask_settings(body, warnings)
    mask = await service.picture(str(body["mask"]), "mask")
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


async def _fields(request: Request) -> dict[str, Any]:
    body = await json_body(request)
    if not isinstance(body, Mapping):
        raise ConfigError("expected a JSON object")
    fields = {name: value for name, value in body.items() if value is not None and name not in ("url", "auth")}
    if isinstance(text := fields.get("infotext"), str):
        if len(text) > 100_000:
            raise ConfigError(Problem("infotext", "longer than 100,000 characters"))
        theirs = {"guidance": "cfg_scale", "sampler": "sampler_name", "schedule": "scheduler"}
        fields = {theirs.get(name, name): value for name, value in from_infotext(text).items()} | fields
    return fields


async def _generate(
    request: Request,
    body: dict[str, Any],
    fields: dict[str, Any],
    warnings: list[str],
    inpainting: Inpainting | None = None,
) -> JSONResponse:
    service = service_of(request)
    started = time.perf_counter()
    options: SdOptions = request.app.state.sd_options
    warnings += [*ignored_fields(body), *(f"option {line}" for line in options.without_effect)]
    fields |= image_fields(body, warnings)
    chosen = options.override(body.get("override_settings") or {}, service)
    fields["model"] = chosen.model
    if chosen.clip_skip is not None:
        fields.setdefault("clip_skip", chosen.clip_skip)
    if body.get("override_settings_restore_afterwards") is False:
        request.app.state.sd_options = chosen
    fields["preview_every"] = LIVE_PREVIEW_EVERY
    with named_as(FIELD_NAMES):
        job, _ = await service.submit_image(ImageRequest.parse(fields), client=f"sdapi {client_of(request)}")
    if isinstance(task := body.get("force_task_id"), str):
        remember_task(request, task, job)
    ended = await wait(request, service, job)
    if ended.state == "failed" and ended.error is not None:
        raise error_of(ended.error)
    pictures = await _pictures(service, ended, inpainting)
    answer = {
        "images": pictures if body.get("send_images", True) else [],
        "parameters": echoed(body),
        "info": json.dumps(generation_info(ended, warnings, whole_number(body, "batch_size") or 1)),
        "loras": (ended.result or {}).get("loras", []),
        "warnings": [*warnings, *(ended.result or {}).get("warnings", []), *ended.request.get("warnings", [])],
        "job_id": job.id,
    }
    return JSONResponse(answer, headers={"X-Process-Time": f"{time.perf_counter() - started:.4f}"})


async def _pictures(service: Service, job: Job, inpainting: Inpainting | None) -> list[str]:
    """The results; of a job that was interrupted its last preview, as A1111 returns what it has."""
    if job.state == "done":
        pictures = await finished_images(service, job)
        if inpainting is not None:
            pictures = [await asyncio.to_thread(inpainting.restore, content) for content in pictures]
        return [_base64(content) for content in pictures]
    events = await asyncio.to_thread(service.store.events, job.id)
    previews = [event.data["image"] for event in events if event.type == "preview"]
    return previews[-1:]
