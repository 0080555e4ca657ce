"""Lists that A1111's clients read before they generate: models, LoRAs, samplers, and empty ones; texts in images."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from inweave.errors import ConfigError, Problem
from inweave.generate.infotext import SAMPLER_LABELS, SCHEDULE_LABELS, from_infotext
from inweave.serve.api.a1111.requests import PngInfo
from inweave.serve.api.context import service_of
from inweave.serve.api.json_body import json_body
from inweave.serve.api.openapi import json_body_of

router = APIRouter(prefix="/sdapi/v1")


@router.get("/sd-models")
async def sd_models(request: Request) -> list[dict[str, Any]]:
    return [
        {"title": name, "model_name": name, "hash": None, "sha256": None, "filename": name, "config": None}
        for name in service_of(request).models.names
    ]


@router.get("/loras")
async def loras(request: Request) -> list[dict[str, Any]]:
    entries = await service_of(request).loras.entries()
    return [
        {"name": e.name, "alias": e.facts.alias or e.name, "path": e.path, "metadata": e.facts.metadata}
        for e in entries
    ]


@router.post("/refresh-loras")
async def refresh_loras(request: Request) -> None:
    await service_of(request).loras.scan()


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


@router.post("/png-info", openapi_extra=json_body_of(PngInfo, {"image": "iVBORw0KGgo..."}))
async def png_info(request: Request) -> dict[str, Any]:
    body = await json_body(request)
    if not isinstance(body, Mapping) or not isinstance(body.get("image"), str):
        raise ConfigError(Problem("image", "expected an image in base64"))
    texts = await service_of(request).images.texts(body["image"], "image")
    info = texts.get("parameters", "")
    return {"info": info, "items": texts, "parameters": from_infotext(info) if info else {}}


@router.get("/memory")
async def memory() -> dict[str, Any]:
    total, free = (os.sysconf("SC_PAGE_SIZE") * os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    ram = {"free": free, "used": total - free, "total": total}
    return {"ram": ram, "cuda": {"error": "not measured by the web process"}}


@router.get("/upscalers")
async def upscalers(request: Request) -> list[dict[str, Any]]:
    names = [each["label"] for each in await service_of(request).prompts.upscalers() if not each["latent"]]
    return [
        {"name": name, "model_name": None, "model_path": None, "model_url": None, "scale": 4}
        for name in ("None", *names)
    ]


@router.get("/latent-upscale-modes")
async def latent_upscale_modes(request: Request) -> list[dict[str, Any]]:
    return [{"name": each["label"]} for each in await service_of(request).prompts.upscalers() if each["latent"]]


@router.get("/prompt-styles")
async def prompt_styles(request: Request) -> list[dict[str, Any]]:
    return [asdict(style) for style in await service_of(request).prompts.styles()]


@router.get("/sd-vae")
@router.get("/hypernetworks")
@router.get("/face-restorers")
@router.get("/realesrgan-models")
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
