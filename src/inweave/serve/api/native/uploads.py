"""Images that jobs name by id: sent once, used in as many jobs as needed.

POST   /v1/uploads               the bytes of an image, or multipart/form-data with one file: 201 {id, ...}
GET    /v1/uploads/{id}          the same facts; 410 once it has expired
GET    /v1/uploads/{id}/file     the image, as PNG
DELETE /v1/uploads/{id}          jobs that named it keep their copy

The content decides the format, not the declared type: PNG, JPEG, WebP or BMP, checked in a process of its own before
it is decoded.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from starlette.datastructures import UploadFile

from inweave.errors import ConfigError
from inweave.serve.api.context import service_of
from inweave.serve.api.openapi import answer_of, binary_body
from inweave.serve.jobs.errors import MediaTypeError

router = APIRouter(prefix="/v1/uploads")
UploadId = Annotated[str, Field(max_length=100)]


@router.post("", status_code=201, openapi_extra=binary_body(form=True))
async def upload(request: Request) -> JSONResponse:
    """Keep an image for later jobs."""
    content = await _content(request)
    if not content:
        raise ConfigError("the body is empty: send the bytes of an image")
    document = (await service_of(request).images.upload(content)).as_dict()
    return JSONResponse(document, 201, headers={"Location": document["url"]})


async def _content(request: Request) -> bytes:
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared == "application/json" or declared.endswith("+json"):
        raise MediaTypeError("send the bytes of the image themselves, or multipart/form-data with one file")
    if declared != "multipart/form-data":
        return await request.body()
    async with request.form(max_files=2, max_fields=20) as form:
        parts = form.multi_items()
        if len(parts) != 1 or not isinstance(parts[0][1], UploadFile):
            raise ConfigError(f"expected one file and nothing else, got {len(parts)} parts")
        return await parts[0][1].read()


@router.get("/{upload}")
async def get_upload(request: Request, upload: UploadId) -> dict[str, Any]:
    return (await service_of(request).images.find_upload(upload)).as_dict()


@router.get("/{upload}/file", response_class=Response, responses=answer_of("image/png"))
@router.head("/{upload}/file", include_in_schema=False)
async def upload_file(request: Request, upload: UploadId) -> Response:
    return Response(await service_of(request).images.uploaded(upload), media_type="image/png")


@router.delete("/{upload}")
async def delete_upload(request: Request, upload: UploadId) -> dict[str, Any]:
    await service_of(request).images.delete_upload(upload)
    return {"deleted": upload}
