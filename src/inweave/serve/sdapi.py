"""AUTOMATIC1111's API below /sdapi/v1, as far as clients use it.

Unknown fields are ignored and every field may be null, as there. Settings that a client leaves out take the model's own
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

from inweave.errors import ConfigError, MissingError
from inweave.generate.infotext import from_infotext
from inweave.serve.bodies import json_body
from inweave.serve.failures import error_of
from inweave.serve.jobs import Job
from inweave.serve.native import client_of, service_of
from inweave.serve.requests import ImageRequest, png_size
from inweave.serve.sdapi_fields import echoed, image_fields, number, unsupported_fields, whole_number
from inweave.serve.sdapi_images import prepare_mask, resize_input
from inweave.serve.sdapi_info import generation_info
from inweave.serve.sdapi_state import remember_task
from inweave.serve.service import Service
from inweave.serve.waiting import finished_images, wait

router = APIRouter(prefix="/sdapi/v1")
LIVE_PREVIEW_EVERY = 5
MAX_SIDE = 4096


@router.post("/txt2img")
async def txt2img(request: Request) -> JSONResponse:
    body = await _fields(request)
    return await _generate(request, body, {"operation": "image_generation"})


@router.post("/img2img")
async def img2img(request: Request) -> JSONResponse:
    body = await _fields(request)
    service = service_of(request)
    images = body.get("init_images") or []
    if not isinstance(images, list) or not images or not isinstance(images[0], str):
        raise MissingError("Init image not found")
    if len(images) > 1:
        raise ConfigError(f"init_images: one picture is expected, got {len(images)}")
    image = await service.picture(images[0], "init_images")
    size = (whole_number(body, "width"), whole_number(body, "height"))
    if max(side or 0 for side in size) > MAX_SIDE:  # before the picture is made that large
        raise ConfigError(f"width, height: at most {MAX_SIDE} pixels")
    fields: dict[str, Any] = {"operation": "image_transform"}
    resized = await asyncio.to_thread(resize_input, image, size, body.get("resize_mode") or 0)
    fields["image"] = base64.b64encode(resized).decode()
    if body.get("mask"):
        mask = await service.picture(str(body["mask"]), "mask")
        ready = await asyncio.to_thread(
            prepare_mask,
            mask,
            png_size(resized),
            body.get("resize_mode") or 0,
            bool(body.get("inpainting_mask_invert")),
        )
        fields |= {"operation": "image_inpaint", "mask_image": base64.b64encode(ready).decode()}
        fields["feather"] = min(256, max(0, int(number(body, "mask_blur") or number(body, "mask_blur_x") or 4)))
    strength = number(body, "denoising_strength")
    fields["strength"] = 0.75 if strength is None else strength
    return await _generate(request, body, fields)


async def _fields(request: Request) -> dict[str, Any]:
    body = await json_body(request)
    if not isinstance(body, Mapping):
        raise ConfigError("expected a JSON object")
    fields = {name: value for name, value in body.items() if value is not None and name not in ("url", "auth")}
    if isinstance(text := fields.get("infotext"), str):
        if len(text) > 100_000:
            raise ConfigError("infotext: longer than 100,000 characters")
        theirs = {"guidance": "cfg_scale", "sampler": "sampler_name", "schedule": "scheduler"}
        fields = {theirs.get(name, name): value for name, value in from_infotext(text).items()} | fields
    return fields


async def _generate(request: Request, body: dict[str, Any], fields: dict[str, Any]) -> JSONResponse:
    service = service_of(request)
    started = time.perf_counter()
    warnings = unsupported_fields(body)
    fields |= image_fields(body, warnings)
    overrides = body.get("override_settings") if isinstance(body.get("override_settings"), Mapping) else {}
    assert isinstance(overrides, Mapping)
    fields["model"] = str(overrides.get("sd_model_checkpoint") or "") or request.app.state.sd_model
    if clip_skip := overrides.get("CLIP_stop_at_last_layers"):
        fields["clip_skip"] = clip_skip
    fields["preview_every"] = LIVE_PREVIEW_EVERY
    job, _ = await service.submit_image(ImageRequest.parse(fields), client=f"sdapi {client_of(request)}")
    if isinstance(task := body.get("force_task_id"), str):
        remember_task(request, task, job)
    ended = await wait(request, service, job)
    if ended.state == "failed" and ended.error is not None:
        raise error_of(ended.error)
    pictures = await _pictures(service, ended)
    answer = {
        "images": pictures if body.get("send_images", True) else [],
        "parameters": echoed(body),
        "info": json.dumps(generation_info(ended, warnings)),
        "loras": (ended.result or {}).get("loras", []),
        "warnings": [*warnings, *(ended.result or {}).get("warnings", []), *ended.request.get("warnings", [])],
        "job_id": job.id,
    }
    return JSONResponse(answer, headers={"X-Process-Time": f"{time.perf_counter() - started:.4f}"})


async def _pictures(service: Service, job: Job) -> list[str]:
    """The results; of a job that was interrupted its last preview, as A1111 returns what it has."""
    if job.state == "done":
        return [base64.b64encode(content).decode() for content in await finished_images(service, job)]
    events = await asyncio.to_thread(service.store.events, job.id)
    previews = [event.data["image"] for event in events if event.type == "preview"]
    return previews[-1:]
