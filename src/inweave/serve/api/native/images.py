"""The settings that an image was made with.

POST /v1/pictures/settings     the bytes of an image of inweave, AUTOMATIC1111, ComfyUI or InvokeAI

{settings, loras, model, warnings}    settings: fields of an image job. loras: each that the image names, and the id of
                                      its file in the library (by hash, else by name), or null. warnings: one line for
                                      each thing that is missing or has no meaning here
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request

from inweave.errors import ConfigError, InweaveError
from inweave.generate.enlarge import upscaler_name
from inweave.generate.prompt import parse
from inweave.library import LibraryEntry
from inweave.models.sampler_names import sampler_name, schedule_name
from inweave.serve.api.context import service_of
from inweave.serve.api.openapi import binary_body
from inweave.serve.jobs.failures import message_of
from inweave.serve.service import Service

router = APIRouter(prefix="/v1/pictures")


@router.post("/settings", openapi_extra=binary_body())
async def image_settings(request: Request) -> dict[str, Any]:
    service = service_of(request)
    content = await request.body()
    if not content:
        raise ConfigError("the body is empty: send the bytes of an image")
    return await settings_document(service, await service.images.settings(content))


async def settings_document(service: Service, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in an image, as fields of `ImageSettings`, with what this worker has of them."""
    config = _canonical(source["config"])
    warnings = [str(line) for line in source["warnings"]]
    if source["axes"]:
        config["grid"] = list(source["axes"])
        warnings = [line for line in warnings if not line.startswith("a grid of ")]
    warnings += [f"{name}: the image was made from another one, which it does not hold" for name in source["inputs"]]
    loras = [await _resolved(service, reference, digest, warnings) for reference, digest in _references(source)]
    name = source["model"].get("name")
    if name and name not in service.models.names:
        warnings.append(f"model {str(name)[:200]}: not served here")
    return {"settings": config, "loras": loras, "model": source["model"], "warnings": warnings}


def _canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with samplers and schedules by the names of `/v1/capabilities`."""
    canonical = dict(config)
    if isinstance(config.get("sampler"), str):
        canonical["sampler"], schedule = sampler_name(config["sampler"])
        if schedule is not None:
            canonical.setdefault("schedule", schedule)
    if isinstance(canonical.get("schedule"), str):
        canonical["schedule"] = schedule_name(canonical["schedule"])
    if isinstance(upscale := canonical.get("upscale"), Mapping) and isinstance(upscale.get("upscaler"), str):
        canonical["upscale"] = {**upscale, "upscaler": upscaler_name(upscale["upscaler"])}
    return canonical


def _references(source: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return every LoRA of the list and of the prompt, and its hash if the image has it."""
    hashes: Mapping[str, str] = source["hashes"]
    references: dict[str, str | None] = {}
    for choice in source["config"].get("loras") or ():
        label = choice.get("name") or choice.get("hash") if isinstance(choice, Mapping) else str(choice)
        if label:
            references[str(label)] = (choice.get("hash") if isinstance(choice, Mapping) else None) or hashes.get(label)
    for tag in parse(str(source["config"].get("prompt", ""))).tags:
        references.setdefault(tag.name, hashes.get(tag.name))
    return list(references.items())


async def _resolved(service: Service, reference: str, digest: str | None, warnings: list[str]) -> dict[str, Any]:
    """Return the LoRA that an image names: by its name and hash, else by its hash, else by its name."""
    by_name, problem = await _lookup(service, reference)
    entry = by_name
    if digest is not None and not (by_name and _has_hash(by_name, digest)):
        entry, _ = await _lookup(service, digest)
        if entry is None and by_name is not None:
            entry = by_name
            if by_name.contents is not None:
                warnings.append(f"LoRA {reference}: a file of that name is here, but not the one that made the image")
    if entry is None:
        warnings.append(problem)
        return {"reference": reference, "id": None, "name": reference}
    return {"reference": reference, "id": entry.id, "name": entry.name}


async def _lookup(service: Service, reference: str) -> tuple[LibraryEntry | None, str]:
    try:
        return await service.loras.find(reference), ""
    except InweaveError as error:
        return None, message_of(error)


def _has_hash(entry: LibraryEntry, digest: str) -> bool:
    contents = entry.contents
    return contents is not None and digest.lower() in (
        contents.sha256, contents.autov1, contents.autov2, contents.autov3,
    )  # fmt: skip
