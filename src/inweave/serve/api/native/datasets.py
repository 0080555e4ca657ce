"""Datasets over HTTP: create one, put pictures and captions into it, see how they will be cropped, train on it.

POST  /v1/datasets {name}     GET /v1/datasets     GET, PATCH {name}, DELETE /v1/datasets/{id}
PUT   /v1/datasets/{id}/pictures/{name}     the bytes of a picture     GET (?thumbnail=true), DELETE the same
PUT   /v1/datasets/{id}/captions/{name}     {caption}
PATCH /v1/datasets/{id}/captions            {captions: {name: text}}: all of them, or none; answers those they replace
POST  /v1/datasets/{id}/crops               {model, settings}: the bucket and the crop of every picture

The datasets of the package (inweave/pixel) can be read and trained on like any other.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.convertors import StringConvertor, register_url_convertor

from inweave.errors import ConflictError
from inweave.files.writing import write_atomic
from inweave.serve.api.json_body import JsonRoute
from inweave.serve.api.native.jobs import service_of
from inweave.serve.api.native.training_requests import checked_settings
from inweave.serve.jobs.errors import StorageError
from inweave.serve.service import Service
from inweave.serve.storage.datasets import MAX_CAPTION, MAX_IMAGES, THUMBNAIL


class DatasetConvertor(StringConvertor):
    """The id of a dataset in an address; those of the package have a slash in it."""

    regex = "(?:inweave/)?[^/]+"


register_url_convertor("dataset", DatasetConvertor())
router = APIRouter(prefix="/v1/datasets", route_class=JsonRoute)
DatasetId = Annotated[str, Field(max_length=200)]
PictureName = Annotated[str, Field(max_length=300)]
CaptionText = Annotated[str, Field(max_length=MAX_CAPTION)]
#: a picture is asked for with its time of change, so that a copy of it never gets old
CACHED = {"Cache-Control": "private, max-age=86400"}


class NewDataset(BaseModel):
    """The name people see."""

    name: Annotated[str, Field(max_length=200)] = ""


class Caption(BaseModel):
    """What a picture shows."""

    caption: CaptionText


class Captions(BaseModel):
    """Captions by the names of their pictures."""

    captions: Annotated[dict[PictureName, CaptionText], Field(min_length=1, max_length=MAX_IMAGES)]


class CropQuestion(BaseModel):
    """What a run would be trained with: buckets depend on the model and on settings such as `resolution`."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(max_length=1000)] | None = None
    settings: dict[str, Any] = Field(default_factory=dict)


@router.post("", status_code=201)
async def create(request: Request, new: NewDataset) -> dict[str, Any]:
    return await asyncio.to_thread(service_of(request).datasets.create, new.name)


@router.get("")
async def summaries(request: Request) -> dict[str, Any]:
    return {"datasets": await asyncio.to_thread(service_of(request).datasets.summaries)}


@router.put("/{dataset}/pictures/{name}")
async def put_picture(request: Request, dataset: DatasetId, name: PictureName) -> dict[str, Any]:
    service = service_of(request)
    await asyncio.to_thread(service.datasets.folder, dataset)
    clean = await service.sandbox.image(await request.body(), f"picture {name[:100]}", service.settings.image_pixels)
    return {"name": await asyncio.to_thread(service.datasets.put_image, dataset, name, clean)}


@router.get("/{dataset:dataset}/pictures/{name}")
async def get_picture(
    request: Request, dataset: DatasetId, name: PictureName, thumbnail: bool = False, v: str | None = None
) -> FileResponse:
    """The picture as PNG, or a small copy of it; ``v``: any text, with which browsers may keep the answer for a day."""
    service, headers = service_of(request), CACHED if v else None
    if thumbnail:
        picture, small = await asyncio.to_thread(service.datasets.thumbnail, dataset, name)
        if small is not None:
            if not small.is_file():
                content = await service.sandbox.thumbnail(str(picture), THUMBNAIL, f"picture {name[:100]}")
                await asyncio.to_thread(_store, small, content)
            return FileResponse(small, media_type="image/webp", headers=headers)
    path = await asyncio.to_thread(service.datasets.image, dataset, name)
    return FileResponse(path, media_type="image/png", headers=headers)


def _store(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, [content], error=StorageError)


@router.delete("/{dataset}/pictures/{name}")
async def delete_picture(request: Request, dataset: DatasetId, name: PictureName) -> dict[str, Any]:
    await asyncio.to_thread(service_of(request).datasets.delete_image, dataset, name)
    return {"deleted": name}


@router.put("/{dataset}/captions/{name}")
async def put_caption(request: Request, dataset: DatasetId, name: PictureName, caption: Caption) -> dict[str, Any]:
    stored = await asyncio.to_thread(service_of(request).datasets.put_caption, dataset, name, caption.caption)
    return {"name": stored}


@router.patch("/{dataset}/captions")
async def put_captions(request: Request, dataset: DatasetId, change: Captions) -> dict[str, Any]:
    before = await asyncio.to_thread(service_of(request).datasets.put_captions, dataset, change.captions)
    return {"changed": len(before), "before": before}


@router.post("/{dataset:dataset}/crops")
async def crops(request: Request, dataset: DatasetId, question: CropQuestion) -> dict[str, Any]:
    service = service_of(request)
    model = service.model(question.model)
    settings = checked_settings(question.settings)
    folder = await asyncio.to_thread(service.datasets.folder, dataset)
    if not await asyncio.to_thread(_has_pictures, folder):
        return {"model": model, "pictures": [], "buckets": {}}
    plan = {"dataset": str(folder), "model": service.models[model], "settings": settings}
    return {"model": model, **await service.planner.call("crops", plan)}


def _has_pictures(folder: Path) -> bool:
    return any(folder.glob("*.png"))


@router.get("/{dataset:dataset}")
async def describe(request: Request, dataset: DatasetId) -> dict[str, Any]:
    return await asyncio.to_thread(service_of(request).datasets.describe, dataset)


@router.patch("/{dataset}")
async def rename(request: Request, dataset: DatasetId, change: NewDataset) -> dict[str, Any]:
    return await asyncio.to_thread(service_of(request).datasets.rename, dataset, change.name)


@router.delete("/{dataset}")
async def delete(request: Request, dataset: DatasetId) -> dict[str, Any]:
    service = service_of(request)
    await asyncio.to_thread(_refuse_in_use, service, dataset)
    await asyncio.to_thread(service.datasets.delete, dataset)
    return {"deleted": dataset}


def _refuse_in_use(service: Service, dataset: str) -> None:
    """A dataset that a run needs stays until the run has ended."""
    for job in service.store.jobs(states=("queued", "running"), limit=100_000):
        if job.kind == "train" and job.request.get("dataset") == dataset:
            raise ConflictError(f"job {job.id} trains on this dataset; cancel it first, or wait until it has ended")
