"""The library over HTTP.

GET    /v1/loras?query=&base=       one line per file
GET    /v1/loras/{reference}        everything that is known of one: by name, path, id or hash
GET    /v1/loras/{reference}/preview, /file
POST   /v1/loras?name=NAME          the bytes of a file: checked in a process of its own, then added
DELETE /v1/loras/{reference}        only files that were uploaded or trained here
POST   /v1/loras/check              {lora, model}: where every tensor goes, or why it does not fit
POST   /v1/loras/refresh            look at the folders now
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field

from inweave.errors import ConfigError, ConflictError, MissingError
from inweave.serve.native import service_of

router = APIRouter(prefix="/v1/loras")
Reference = Annotated[str, Field(max_length=1000)]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._()\[\]-]{0,119}")
_PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}


class LoraCheck(BaseModel):
    """A LoRA of the library, and the model it should fit."""

    lora: Reference
    model: Annotated[str, Field(max_length=1000)] | None = None
    values: Literal["none", "sample", "full"] = "sample"


@router.get("")
async def list_loras(
    request: Request,
    query: Annotated[str, Query(max_length=200)] = "",
    base: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
) -> dict[str, Any]:
    library = service_of(request).library
    entries = await asyncio.to_thread(library.entries, query, base=base, limit=limit, offset=offset)
    total = await asyncio.to_thread(library.count)
    return {"loras": [entry.as_dict(details=False) for entry in entries], "total": total}


@router.post("", status_code=201)
async def upload(request: Request, name: Annotated[str, Query(max_length=200)]) -> dict[str, Any]:
    stem = name.strip().removesuffix(".safetensors")
    if not _NAME.fullmatch(stem) or stem.endswith((" ", ".")):
        raise ConfigError("name: letters, digits, spaces, dots, dashes and underscores, at most 120")
    service = service_of(request)
    entry = await service.add_lora(stem, request.stream())
    return entry.as_dict()


@router.post("/check")
async def check_lora(request: Request, question: LoraCheck) -> dict[str, Any]:
    service = service_of(request)
    entry = await asyncio.to_thread(service.library.find, question.lora)
    model = service.model(question.model)
    verdict = await service.checker.lora(str(entry.file), service.base_of(model), f"LoRA {entry.name}", question.values)
    return {"lora": entry.as_dict(details=False), "model": model, "verdict": verdict}


@router.post("/refresh")
async def refresh_loras(request: Request) -> dict[str, Any]:
    service = service_of(request)
    await service.scan()
    return {"loras": await asyncio.to_thread(service.library.count)}


@router.get("/{reference:path}/preview")
async def preview(request: Request, reference: Reference) -> FileResponse:
    entry = await asyncio.to_thread(service_of(request).library.find, reference)
    path = entry.file.parent / (entry.facts.preview or "")
    if entry.facts.preview is None or not path.is_file() or path.is_symlink():
        raise MissingError(f"LoRA {entry.name} has no preview picture")
    return FileResponse(path, media_type=_PICTURES[path.suffix.lower()])


@router.get("/{reference:path}/file")
async def download(request: Request, reference: Reference) -> FileResponse:
    entry = await asyncio.to_thread(service_of(request).library.find, reference)
    if not entry.file.is_file():
        raise ConflictError(f"LoRA {entry.name} is a folder of several files")
    return FileResponse(entry.file, media_type="application/octet-stream", filename=entry.file.name)


@router.get("/{reference:path}")
async def get_lora(request: Request, reference: Reference) -> dict[str, Any]:
    return (await asyncio.to_thread(service_of(request).library.find, reference)).as_dict()


@router.delete("/{reference:path}")
async def delete_lora(request: Request, reference: Reference) -> dict[str, Any]:
    service = service_of(request)
    entry = await asyncio.to_thread(service.library.find, reference)
    if entry.root != str(service.loras.resolve()):
        raise ConflictError(f"LoRA {entry.name} was not added through this worker; remove it from its folder")
    await asyncio.to_thread(entry.file.unlink)
    await asyncio.to_thread(service.library.scan)
    return {"deleted": entry.id}
