"""Datasets over HTTP: create one, put images and captions into it, see how they will be cropped, train on it.

POST  /v1/datasets {name}     GET /v1/datasets     GET, PATCH {name}, DELETE /v1/datasets/{id}
PUT   /v1/datasets/{id}/pictures/{name}     the bytes of an image     GET (?thumbnail=true), DELETE the same
POST  /v1/datasets/{id}/pictures/{name}/caption {instruction}     a caption by the worker's own model, not stored
PUT   /v1/datasets/{id}/captions/{name}     {caption}
PATCH /v1/datasets/{id}/captions            {captions: {name: text}}: all of them, or none; returns those they replace
POST  /v1/datasets/{id}/crops               {model, settings}: the bucket and the crop of every image

The datasets of the package (inweave/pixel) can be read and trained on like any other.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.convertors import StringConvertor, register_url_convertor

from inweave.serve.api.context import service_of
from inweave.serve.api.json_body import JsonRoute
from inweave.serve.api.openapi import MAY_BE_BUSY, answer_of, binary_body
from inweave.serve.service.datasets import MAX_CAPTION, MAX_IMAGES


class DatasetConvertor(StringConvertor):
    """The id of a dataset in an address; those of the package have a slash in it."""

    regex = "(?:inweave/)?[^/]+"


register_url_convertor("dataset", DatasetConvertor())
router = APIRouter(prefix="/v1/datasets", route_class=JsonRoute)
DatasetId = Annotated[str, Field(max_length=200)]
ImageName = Annotated[str, Field(max_length=300)]
CaptionText = Annotated[str, Field(max_length=MAX_CAPTION)]
#: images are requested with their time of change, so that a cached copy is never stale
CACHED = {"Cache-Control": "private, max-age=86400"}


class NewDataset(BaseModel):
    """The name people see."""

    name: Annotated[str, Field(max_length=200)] = ""


class Caption(BaseModel):
    """The description of an image."""

    caption: CaptionText


class CaptionQuestion(BaseModel):
    """An instruction for models that follow one; for others the beginning of the caption."""

    model_config = ConfigDict(extra="forbid")

    instruction: Annotated[str, Field(max_length=2000)] = ""


class Captions(BaseModel):
    """Captions by the names of their images."""

    captions: Annotated[dict[ImageName, CaptionText], Field(min_length=1, max_length=MAX_IMAGES)]


class CropQuestion(BaseModel):
    """A planned run: buckets depend on the model and on settings such as `resolution`."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(max_length=1000)] | None = None
    settings: dict[str, Any] = Field(default_factory=dict)


@router.post("", status_code=201)
async def create(request: Request, new: NewDataset) -> dict[str, Any]:
    return await service_of(request).datasets.create(new.name)


@router.get("")
async def summaries(request: Request) -> dict[str, Any]:
    return {"datasets": await service_of(request).datasets.summaries()}


@router.put("/{dataset}/pictures/{name}", openapi_extra=binary_body())
async def put_image(request: Request, dataset: DatasetId, name: ImageName) -> dict[str, Any]:
    return {"name": await service_of(request).datasets.put_image(dataset, name, await request.body())}


@router.get("/{dataset:dataset}/pictures/{name}", response_class=FileResponse, responses=answer_of("image/png"))
async def get_image(
    request: Request, dataset: DatasetId, name: ImageName, thumbnail: bool = False, v: str | None = None
) -> FileResponse:
    """Return the image as PNG, or a small copy of it; ``v``: any text, with which browsers may cache it for a day."""
    datasets, headers = service_of(request).datasets, CACHED if v else None
    if thumbnail and (small := await datasets.thumbnail(dataset, name)) is not None:
        return FileResponse(small, media_type="image/webp", headers=headers)
    return FileResponse(await datasets.image(dataset, name), media_type="image/png", headers=headers)


@router.delete("/{dataset}/pictures/{name}")
async def delete_image(request: Request, dataset: DatasetId, name: ImageName) -> dict[str, Any]:
    await service_of(request).datasets.delete_image(dataset, name)
    return {"deleted": name}


@router.post("/{dataset:dataset}/pictures/{name}/caption", responses=MAY_BE_BUSY)
async def suggest_caption(
    request: Request, dataset: DatasetId, name: ImageName, question: CaptionQuestion
) -> dict[str, Any]:
    caption = await service_of(request).datasets.suggest_caption(dataset, name, question.instruction)
    return {"name": name, "caption": caption}


@router.put("/{dataset}/captions/{name}")
async def put_caption(request: Request, dataset: DatasetId, name: ImageName, caption: Caption) -> dict[str, Any]:
    stored = await service_of(request).datasets.put_caption(dataset, name, caption.caption)
    return {"name": stored}


@router.patch("/{dataset}/captions")
async def put_captions(request: Request, dataset: DatasetId, change: Captions) -> dict[str, Any]:
    before = await service_of(request).datasets.put_captions(dataset, change.captions)
    return {"changed": len(before), "before": before}


@router.post("/{dataset:dataset}/crops", responses=MAY_BE_BUSY)
async def crops(request: Request, dataset: DatasetId, question: CropQuestion) -> dict[str, Any]:
    training = service_of(request).training
    return await training.crops(model=question.model, dataset=dataset, settings=question.settings)


@router.get("/{dataset:dataset}")
async def describe(request: Request, dataset: DatasetId) -> dict[str, Any]:
    return await service_of(request).datasets.describe(dataset)


@router.patch("/{dataset}")
async def rename(request: Request, dataset: DatasetId, change: NewDataset) -> dict[str, Any]:
    return await service_of(request).datasets.rename(dataset, change.name)


@router.delete("/{dataset}")
async def delete(request: Request, dataset: DatasetId) -> dict[str, Any]:
    await service_of(request).datasets.delete(dataset)
    return {"deleted": dataset}
