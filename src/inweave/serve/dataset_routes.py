"""Datasets over HTTP: create one, put pictures and captions into it, train on it.

POST /v1/datasets {name}     GET /v1/datasets     GET, DELETE /v1/datasets/{id}
PUT /v1/datasets/{id}/pictures/{name}     the bytes of a picture     GET, DELETE the same
PUT /v1/datasets/{id}/captions/{name}     {caption}
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field

from inweave.serve.native import service_of

router = APIRouter(prefix="/v1/datasets")


class NewDataset(BaseModel):
    """The name people see."""

    name: Annotated[str, Field(max_length=200)] = ""


class Caption(BaseModel):
    """What a picture shows."""

    caption: Annotated[str, Field(max_length=20_000)]


@router.post("", status_code=201)
async def create(request: Request, new: NewDataset) -> dict[str, Any]:
    return await asyncio.to_thread(service_of(request).datasets.create, new.name)


@router.get("")
async def summaries(request: Request) -> dict[str, Any]:
    return {"datasets": await asyncio.to_thread(service_of(request).datasets.summaries)}


@router.get("/{dataset}")
async def describe(request: Request, dataset: str) -> dict[str, Any]:
    return await asyncio.to_thread(service_of(request).datasets.describe, dataset)


@router.delete("/{dataset}")
async def delete(request: Request, dataset: str) -> dict[str, Any]:
    await asyncio.to_thread(service_of(request).datasets.delete, dataset)
    return {"deleted": dataset}


@router.put("/{dataset}/pictures/{name}")
async def put_picture(request: Request, dataset: str, name: str) -> dict[str, Any]:
    service = service_of(request)
    await asyncio.to_thread(service.datasets.folder, dataset)
    clean = await service.checker.picture(await request.body(), f"picture {name[:100]}", service.settings.image_pixels)
    return {"name": await asyncio.to_thread(service.datasets.put_picture, dataset, name, clean)}


@router.get("/{dataset}/pictures/{name}")
async def get_picture(request: Request, dataset: str, name: str) -> FileResponse:
    path = await asyncio.to_thread(service_of(request).datasets.picture, dataset, name)
    return FileResponse(path, media_type="image/png")


@router.delete("/{dataset}/pictures/{name}")
async def delete_picture(request: Request, dataset: str, name: str) -> dict[str, Any]:
    await asyncio.to_thread(service_of(request).datasets.delete_picture, dataset, name)
    return {"deleted": name}


@router.put("/{dataset}/captions/{name}")
async def put_caption(request: Request, dataset: str, name: str, caption: Caption) -> dict[str, Any]:
    stored = await asyncio.to_thread(service_of(request).datasets.put_caption, dataset, name, caption.caption)
    return {"name": stored}
