"""AUTOMATIC1111's API below /sdapi/v1, as far as clients use it.

Unknown fields are ignored and every field may be null, as there. Settings that a client leaves out take the model's own
values. What cannot be honored (hires fix, face restoration, scripts, ...) is named in `info` and in `warnings`; a LoRA that is
unknown or does not fit is an error, unless the request says on_mismatch = "warn".
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from inweave.errors import ConfigError, MissingError
from inweave.generate.infotext import SAMPLER_LABELS, SCHEDULE_LABELS, from_infotext, infotext
from inweave.models.samplers import SAMPLERS, SCHEDULES, sampler_name, schedule_name
from inweave.serve.jobs import Job
from inweave.serve.native import client_of, json_body, service_of
from inweave.serve.requests import ImageRequest, decode_base64
from inweave.serve.sdapi_images import prepare_mask, resize_input
from inweave.serve.service import Service
from inweave.serve.waiting import finished_images, wait

router = APIRouter(prefix="/sdapi/v1")
LIVE_PREVIEW_EVERY = 5
_TAG = re.compile(r"<(?:lora|lyco):[^<>]*>")
#: fields that change a picture elsewhere and have no effect here -> their values that mean "off"
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "subseed_strength": (0,), "seed_resize_from_h": (-1, 0), "seed_resize_from_w": (-1, 0), "restore_faces": (False,),
    "tiling": (False,), "enable_hr": (False,), "refiner_checkpoint": ("", "None"), "s_churn": (0,), "s_tmin": (0,),
    "s_noise": (1,), "s_min_uncond": (0,), "eta": (0,), "styles": ([],), "alwayson_scripts": ({},),
    "firstpass_image": ("",), "initial_noise_multiplier": (1,), "image_cfg_scale": (), "latent_mask": ("",),
}  # fmt: skip


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
    size = (_whole(body, "width"), _whole(body, "height"))
    fields: dict[str, Any] = {"operation": "image_transform"}
    resized = await asyncio.to_thread(resize_input, image, size, body.get("resize_mode") or 0)
    fields["image"] = base64.b64encode(resized).decode()
    if body.get("mask"):
        mask = await service.picture(str(body["mask"]), "mask")
        ready = await asyncio.to_thread(
            prepare_mask, mask, size, body.get("resize_mode") or 0, bool(body.get("inpainting_mask_invert"))
        )
        fields |= {"operation": "image_inpaint", "mask_image": base64.b64encode(ready).decode()}
        fields["feather"] = min(256, max(0, int(_number(body, "mask_blur") or _number(body, "mask_blur_x") or 4)))
    strength = _number(body, "denoising_strength")
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
    warnings = _unsupported(body)
    fields |= _settings(body, warnings)
    overrides = body.get("override_settings") if isinstance(body.get("override_settings"), Mapping) else {}
    assert isinstance(overrides, Mapping)
    fields["model"] = str(overrides.get("sd_model_checkpoint") or "") or request.app.state.sd_model
    if clip_skip := overrides.get("CLIP_stop_at_last_layers"):
        fields["clip_skip"] = clip_skip
    fields["preview_every"] = LIVE_PREVIEW_EVERY
    job, _ = await service.submit_image(ImageRequest.parse(fields), client=f"sdapi {client_of(request)}")
    if isinstance(task := body.get("force_task_id"), str):
        request.app.state.tasks[task[:200]] = job.id
    ended = await wait(request, service, job)
    if ended.state == "failed" and ended.error is not None:
        from inweave.serve.failures import error_of

        raise error_of(ended.error)
    pictures = await _pictures(service, ended)
    answer = {
        "images": pictures if body.get("send_images", True) else [],
        "parameters": _echo(body),
        "info": json.dumps(_info(ended, warnings)),
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


def _settings(body: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """A1111's fields in our words."""
    names = {"prompt": "prompt", "negative_prompt": "negative_prompt", "steps": "steps", "cfg_scale": "guidance",
             "width": "width", "height": "height", "clip_skip": "clip_skip", "on_mismatch": "on_mismatch",
             "loras": "loras"}  # fmt: skip
    fields = {ours: body[theirs] for theirs, ours in names.items() if theirs in body}
    for name in ("steps", "width", "height", "clip_skip"):  # clients send 20.0 for 20
        if isinstance(fields.get(name), float) and fields[name].is_integer():
            fields[name] = int(fields[name])
    if body.get("disable_extra_networks"):
        fields["prompt"] = _TAG.sub("", str(fields.get("prompt", "")))
    if not str(fields.get("prompt", "")).strip():
        fields["prompt"] = " "
    seed = body.get("seed", -1)
    fields["seed"] = int(seed) if isinstance(seed, float) and seed.is_integer() else seed
    batches = (_whole(body, "batch_size") or 1) * (_whole(body, "n_iter") or 1)
    fields["count"] = batches
    sampler = str(body.get("sampler_name") or body.get("sampler_index") or "")
    if sampler:
        known, schedule = sampler_name(sampler)
        if known in SAMPLERS:
            fields["sampler"] = known
            if schedule is not None:
                fields["schedule"] = schedule
        else:
            warnings.append(f"sampler {sampler[:60]!r} is unknown; the model's own was used")
    if scheduler := str(body.get("scheduler") or ""):
        if schedule_name(scheduler) in SCHEDULES:
            fields["schedule"] = schedule_name(scheduler)
        else:
            warnings.append(f"scheduler {scheduler[:60]!r} is unknown; the default was used")
    if script := body.get("script_name"):
        raise ConfigError(f"script_name: script {str(script)[:60]!r} not found; scripts are not supported")
    return fields


def _unsupported(body: Mapping[str, Any]) -> list[str]:
    """One line per field that has no effect here and is not off."""
    return [
        f"{name} has no effect here"
        for name, off in _UNSUPPORTED.items()
        if name in body and body[name] not in off and body[name] is not None
    ]


def _whole(body: Mapping[str, Any], name: str) -> int | None:
    value = _number(body, name)
    if value is None:
        return None
    if value != int(value) or not 0 <= value <= 100_000:
        raise ConfigError(f"{name}: expected a whole number, got {value:g}")
    return int(value)


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 2**62:
        raise ConfigError(f"{name}: expected a number")
    return float(value)


def _echo(body: Mapping[str, Any]) -> dict[str, Any]:
    echo = dict(body)
    if not body.get("include_init_images"):
        echo |= {name: None for name in ("init_images", "mask") if name in echo}
    return echo


def _info(job: Job, warnings: list[str]) -> dict[str, Any]:
    """The JSON text that A1111 sends beside the pictures."""
    result = job.result or {"images": [], "loras": [], "warnings": [], "model": {"name": job.model}}
    images = result["images"]
    first = images[0]["settings"] if images else {**job.request["config"]}
    seeds = [image["seed"] for image in images]
    records = [
        {"config": image["settings"], "loras": result["loras"], "model": result["model"], "inputs": {}}
        for image in images
    ]
    extra: dict[str, Any] = {}
    if result["loras"]:
        extra["Lora hashes"] = ", ".join(f"{lora['name']}: {lora['autov3']}" for lora in result["loras"])
        extra["LoRA modules"] = {lora["name"]: lora["modules"] for lora in result["loras"]}
    if every := [*warnings, *result["warnings"], *job.request.get("warnings", [])]:
        extra["Warnings"] = every
    prompt, negative = first.get("prompt", ""), first.get("negative_prompt", "")
    return {
        "prompt": prompt, "all_prompts": [prompt] * len(images), "negative_prompt": negative,
        "all_negative_prompts": [negative] * len(images), "seed": seeds[0] if seeds else first.get("seed", -1),
        "all_seeds": seeds, "subseed": -1, "all_subseeds": [-1] * len(images), "subseed_strength": 0,
        "width": first.get("width"), "height": first.get("height"),
        "sampler_name": SAMPLER_LABELS.get(first.get("sampler", ""), first.get("sampler")), "cfg_scale": first.get("guidance"),
        "steps": first.get("steps"), "batch_size": len(images), "restore_faces": False, "face_restoration_model": None,
        "sd_model_name": job.model, "sd_model_hash": None, "sd_vae_name": None, "sd_vae_hash": None,
        "seed_resize_from_w": -1, "seed_resize_from_h": -1, "denoising_strength": first.get("strength"),
        "extra_generation_params": extra, "index_of_first_image": 0, "infotexts": [infotext(record) for record in records],
        "styles": [], "job_timestamp": time.strftime("%Y%m%d%H%M%S", time.localtime(job.created)),
        "clip_skip": first.get("clip_skip", 1), "is_using_inpainting_conditioning": False, "version": "inweave",
        "interrupted": job.state == "cancelled",
    }  # fmt: skip


@router.get("/progress")
async def progress(request: Request, skip_current_image: bool = False) -> dict[str, Any]:
    service = service_of(request)
    jobs = await asyncio.to_thread(service.store.jobs, states=("running", "queued"), limit=200)
    running = next((job for job in jobs if job.state == "running"), None)
    state: dict[str, Any] = {
        "skipped": False, "interrupted": False, "stopping_generation": False, "job": running.id if running else "",
        "job_count": len(jobs), "job_timestamp": "0", "job_no": 0, "sampling_step": 0, "sampling_steps": 0,
    }  # fmt: skip
    share, eta, image = 0.0, 0.0, None
    if running is not None:
        events = await asyncio.to_thread(service.store.events, running.id)
        at = next((each.data for each in reversed(events) if each.type in ("progress", "preview")), None)
        if at is not None:
            share, eta = at["step"] / at["total"], at["eta"]
            state |= {"sampling_step": at["step"], "sampling_steps": at["total"]}
        if not skip_current_image:
            image = next((each.data["image"] for each in reversed(events) if each.type == "preview"), None)
        state |= {"interrupted": running.cancel, "stopping_generation": running.cancel}
        state["job_timestamp"] = time.strftime("%Y%m%d%H%M%S", time.localtime(running.started or running.created))
    return {"progress": share, "eta_relative": eta, "state": state, "current_image": image, "textinfo": None}


@router.post("/interrupt")
async def interrupt(request: Request) -> dict[str, Any]:
    """Cancel the caller's newest job; nobody else's."""
    service = service_of(request)
    jobs = await asyncio.to_thread(service.store.jobs, states=("running", "queued"), limit=1000)
    mine = next((job for job in jobs if job.client == f"sdapi {client_of(request)}"), None)
    if mine is not None:
        await service.abandon(mine.id)
    return {}


@router.post("/skip")
async def skip(request: Request) -> None:
    await interrupt(request)


@router.get("/options")
async def options(request: Request) -> dict[str, Any]:
    return {
        "sd_model_checkpoint": request.app.state.sd_model, "sd_checkpoint_hash": "", "sd_vae": "Automatic",
        "samples_format": "png", "CLIP_stop_at_last_layers": 1, "live_previews_enable": True,
    }  # fmt: skip


@router.post("/options")
async def change_options(request: Request) -> None:
    body = await json_body(request)
    if not isinstance(body, Mapping):
        raise ConfigError("expected a JSON object")
    name = body.get("sd_model_checkpoint")
    if isinstance(name, str) and name:
        request.app.state.sd_model = service_of(request).model(name)


@router.get("/sd-models")
async def sd_models(request: Request) -> list[dict[str, Any]]:
    return [
        {"title": name, "model_name": name, "hash": None, "sha256": None, "filename": name, "config": None}
        for name in service_of(request).models
    ]


@router.get("/loras")
async def loras(request: Request) -> list[dict[str, Any]]:
    entries = await asyncio.to_thread(service_of(request).library.entries)
    return [
        {"name": e.name, "alias": e.facts.alias or e.name, "path": e.path, "metadata": e.facts.metadata}
        for e in entries
    ]


@router.post("/refresh-loras")
async def refresh_loras(request: Request) -> None:
    await service_of(request).scan()


@router.post("/refresh-checkpoints")
async def refresh_checkpoints() -> None:
    return None


@router.get("/samplers")
async def samplers() -> list[dict[str, Any]]:
    return [{"name": label, "aliases": [name], "options": {}} for name, label in SAMPLER_LABELS.items()]


@router.get("/schedulers")
async def schedulers() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "label": label,
            "aliases": [],
            "default_rho": 7.0 if name == "karras" else -1,
            "need_inner_model": False,
        }
        for name, label in SCHEDULE_LABELS.items()
    ]


@router.post("/png-info")
async def png_info(request: Request) -> dict[str, Any]:
    body = await json_body(request)
    if not isinstance(body, Mapping) or not isinstance(body.get("image"), str):
        raise ConfigError("image: expected a picture in base64")
    service = service_of(request)
    content = decode_base64(body["image"], "image", service.settings.body_bytes)
    texts = await service.checker.record(content)
    info = texts.get("parameters", "")
    return {"info": info, "items": texts, "parameters": from_infotext(info) if info else {}}


@router.get("/memory")
async def memory() -> dict[str, Any]:
    return {"ram": {}, "cuda": {}}


@router.get("/sd-vae")
@router.get("/upscalers")
@router.get("/latent-upscale-modes")
@router.get("/hypernetworks")
@router.get("/face-restorers")
@router.get("/realesrgan-models")
@router.get("/prompt-styles")
@router.get("/script-info")
@router.get("/extensions")
@router.get("/artists")
@router.get("/artist-categories")
async def nothing() -> list[Any]:
    return []


@router.get("/embeddings")
async def embeddings() -> dict[str, Any]:
    return {"loaded": {}, "skipped": {}}


@router.get("/scripts")
async def scripts() -> dict[str, Any]:
    return {"txt2img": [], "img2img": []}


@router.get("/cmd-flags")
async def cmd_flags() -> dict[str, Any]:
    return {"api": True}
