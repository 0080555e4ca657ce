"""Pictures that jobs name by id: sent once, used in as many jobs as needed.

POST   /v1/uploads               the bytes of a picture, or multipart/form-data with one file: 201 {id, width, height, ...}
GET    /v1/uploads/{id}          the same facts; 410 once it has expired
GET    /v1/uploads/{id}/file     the picture, as PNG
DELETE /v1/uploads/{id}          jobs that named it keep their copy

The content decides what a picture is, not its declared type: PNG, JPEG, WebP or BMP, checked in a process of its own
before it is decoded.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from starlette.datastructures import UploadFile

from inweave.errors import ConfigError
from inweave.serve.api.native.jobs import service_of
from inweave.serve.jobs.errors import MediaTypeError

router = APIRouter(prefix="/v1/uploads")
UploadId = Annotated[str, Field(max_length=100)]
_BYTES = {"type": "string", "format": "binary"}
_BODY = {
    "required": True,
    "content": {
        "application/octet-stream": {"schema": _BYTES},
        "multipart/form-data": {"schema": {"type": "object", "required": ["file"], "properties": {"file": _BYTES}}},
    },
}


@router.post("", status_code=201, openapi_extra={"requestBody": _BODY})
async def upload(request: Request) -> JSONResponse:
    """Keep a picture for jobs to come."""
    service = service_of(request)
    content = await _picture(request)
    if not content:
        raise ConfigError("the body is empty: send the bytes of a picture")
    clean = await service.sandbox.image(content, "picture", service.settings.image_pixels)
    document = (await asyncio.to_thread(service.uploads.add, clean)).as_dict()
    return JSONResponse(document, 201, headers={"Location": document["url"]})


async def _picture(request: Request) -> bytes:
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared == "application/json" or declared.endswith("+json"):
        raise MediaTypeError("send the bytes of the picture themselves, or multipart/form-data with one file")
    if declared != "multipart/form-data":
        return await request.body()
    async with request.form(max_files=2, max_fields=20) as form:
        parts = form.multi_items()
        if len(parts) != 1 or not isinstance(parts[0][1], UploadFile):
            raise ConfigError(f"expected one file and nothing else, got {len(parts)} parts")
        return await parts[0][1].read()


@router.get("/{upload}")
async def get_upload(request: Request, upload: UploadId) -> dict[str, Any]:
    return (await asyncio.to_thread(service_of(request).uploads.find, upload)).as_dict()


@router.get("/{upload}/file")
@router.head("/{upload}/file", include_in_schema=False)
async def upload_file(request: Request, upload: UploadId) -> Response:
    content = await asyncio.to_thread(service_of(request).uploads.read, upload)
    return Response(content, media_type="image/png")


@router.delete("/{upload}")
async def delete_upload(request: Request, upload: UploadId) -> dict[str, Any]:
    await asyncio.to_thread(service_of(request).uploads.remove, upload)
    return {"deleted": upload}
