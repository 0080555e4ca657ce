"""The library over HTTP.

GET    /v1/loras?query=&base=       one line per file
GET    /v1/loras/{reference}        all facts about one: by name, path, id or hash
GET    /v1/loras/{reference}/preview, /file
POST   /v1/loras/{reference}/sample {with, without}     keep images of two jobs as its sample, of one prompt and seed
GET    /v1/loras/{reference}/sample, ?without=true
POST   /v1/loras?name=NAME          the bytes of a file: checked in a process of its own, then added
DELETE /v1/loras/{reference}        only files that were uploaded or trained here
POST   /v1/loras/check              {lora, model | base}: whether it fits; with `placements`, where every tensor goes
POST   /v1/loras/convert            {lora, to, base, drop}: the same LoRA in another dialect, to be downloaded
GET    /v1/conversions/{id}         the file, for an hour
POST   /v1/loras/refresh            look at the folders now
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from inweave.errors import ConfigError, ConflictError, MissingError, Problem
from inweave.serve.api.context import service_of
from inweave.serve.api.file_responses import library_file
from inweave.serve.api.json_body import JsonRoute
from inweave.serve.api.openapi import answer_of, binary_body

router = APIRouter(prefix="/v1/loras", route_class=JsonRoute)
conversions = APIRouter(prefix="/v1/conversions")
Reference = Annotated[str, Field(max_length=1000)]
_NAME = re.compile(r"[^\W_][\w ._()\[\]-]{0,119}")  # letters and digits of any script
MAX_NAME_BYTES = 200  # a file name may have 255, with its ending and a number
CACHED = {"Cache-Control": "private, max-age=86400"}
_IMAGES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}


class LoraCheck(BaseModel):
    """A LoRA of the library, and what it should fit: a model of this worker, or any base that inweave knows by name."""

    lora: Reference
    model: Annotated[str, Field(max_length=1000)] | None = None
    base: Annotated[str, Field(max_length=200)] | None = None
    values: Literal["none", "sample", "full"] = "sample"
    placements: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> LoraCheck:
        if self.model is not None and self.base is not None:
            raise ValueError("model or base, not both")
        return self


class LoraConversion(BaseModel):
    """A LoRA of the library, and the dialect to write it in. ``drop``: leave out what the dialect cannot express."""

    lora: Reference
    to: Annotated[str, Field(max_length=100)]
    base: Annotated[str, Field(max_length=200)] | None = None
    drop: bool = False


@router.get("")
async def list_loras(
    request: Request,
    query: Annotated[str, Query(max_length=200)] = "",
    base: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
) -> dict[str, Any]:
    loras = service_of(request).loras
    entries = await loras.entries(query, base=base, limit=limit, offset=offset)
    return {"loras": await loras.documents(*entries), "total": await loras.count()}


@router.post("", status_code=201, openapi_extra=binary_body())
async def upload(request: Request, name: Annotated[str, Query(max_length=200)]) -> dict[str, Any]:
    stem = unicodedata.normalize("NFC", name.strip().removesuffix(".safetensors"))
    if not _NAME.fullmatch(stem) or stem.endswith((" ", ".")) or len(stem.encode()) > MAX_NAME_BYTES:
        raise ConfigError(Problem("name", "letters, digits, spaces, dots, dashes and underscores, at most 120"))
    loras = service_of(request).loras
    (document,) = await loras.documents(await loras.add(stem, request.stream()), details=True)
    return document


@router.post("/check")
async def check_lora(request: Request, question: LoraCheck) -> dict[str, Any]:
    return await service_of(request).loras.check(
        question.lora, model=question.model, base=question.base, values=question.values, placements=question.placements
    )


@router.post("/convert", status_code=201)
async def convert_lora(request: Request, wish: LoraConversion) -> dict[str, Any]:
    return await service_of(request).loras.convert(wish.lora, to=wish.to, base=wish.base, drop=wish.drop)


@conversions.get("/{conversion}")
async def converted_file(request: Request, conversion: Annotated[str, Field(max_length=100)]) -> FileResponse:
    path, name = service_of(request).loras.converted(conversion)
    return FileResponse(path, media_type="application/octet-stream", filename=name)


@router.post("/refresh")
async def refresh_loras(request: Request) -> dict[str, Any]:
    loras = service_of(request).loras
    await loras.scan()
    return {"loras": await loras.count()}


@router.get("/{reference:path}/preview")
@router.head("/{reference:path}/preview", include_in_schema=False)
async def preview(request: Request, reference: Reference) -> FileResponse:
    entry = await service_of(request).loras.find(reference)
    name = entry.facts.preview
    if name is None:
        raise MissingError(f"LoRA {entry.name} has no preview image")
    folder = entry.path.rpartition("/")[0]
    return library_file(
        entry.root, f"{folder}/{name}" if folder else name, f"the preview image of LoRA {entry.name}",
        media_type=_IMAGES[Path(name).suffix.lower()],
    )  # fmt: skip


class SampleJobs(BaseModel):
    """Two jobs that are done, which differ in the LoRA alone."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    with_lora: Annotated[str, Field(max_length=100, alias="with")]
    without: Annotated[str, Field(max_length=100)]


@router.post("/{reference:path}/sample", status_code=201)
async def keep_sample(request: Request, reference: Reference, jobs: SampleJobs) -> dict[str, Any]:
    return await service_of(request).lora_samples.keep(reference, jobs.with_lora, jobs.without)


@router.get("/{reference:path}/sample", response_class=FileResponse, responses=answer_of("image/webp"))
async def sample(request: Request, reference: Reference, without: bool = False, v: str | None = None) -> FileResponse:
    """Return the image with the LoRA, or ``without`` it; ``v``: any text, with which it may be cached for a day."""
    loras = service_of(request).loras
    path = loras.samples.image(await loras.find(reference), "without" if without else "with")
    return FileResponse(path, media_type="image/webp", headers=CACHED if v else None)


@router.get("/{reference:path}/file")
@router.head("/{reference:path}/file", include_in_schema=False)
async def download(request: Request, reference: Reference) -> FileResponse:
    entry = await service_of(request).loras.find(reference)
    if entry.file.is_dir():
        raise ConflictError(f"LoRA {entry.name} is a folder of several files")
    return library_file(
        entry.root, entry.path, f"the file of LoRA {entry.name}",
        media_type="application/octet-stream", filename=entry.file.name,
    )  # fmt: skip


@router.get("/{reference:path}")
async def get_lora(request: Request, reference: Reference) -> dict[str, Any]:
    loras = service_of(request).loras
    (document,) = await loras.documents(await loras.find(reference), details=True)
    return document


@router.delete("/{reference:path}")
async def delete_lora(request: Request, reference: Reference) -> dict[str, Any]:
    return {"deleted": await service_of(request).loras.remove(reference)}
