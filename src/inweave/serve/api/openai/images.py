"""Images in answers, or in a stream of events.

POST /v1/images/generations   JSON; extra fields are ours: loras, negative_prompt, seed, steps, guidance, sampler, ...
POST /v1/images/edits         multipart; transparent parts of the mask are repainted; an edit model sees every image as
                              a reference, but for the one that a mask belongs to

A caller that hangs up cancels its job, because no other caller could fetch the result.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from inweave.errors import CancelledError, ConfigError, Problem, RequestError
from inweave.serve.api.context import client_of, service_of
from inweave.serve.api.event_streams import HEARTBEAT
from inweave.serve.api.json_body import json_body
from inweave.serve.api.openai.errors import render
from inweave.serve.api.openai.output import Output
from inweave.serve.api.openai.requests import (
    ImagesEdit,
    ImagesGeneration,
    dimensions,
    field_names,
    form_fields,
    ignored_fields,
    image_request,
    partial_images,
)
from inweave.serve.api.openapi import MAY_BE_BUSY, form_body_of, json_body_of
from inweave.serve.api.resize import MAX_SIDE, resize_input
from inweave.serve.api.waiting import wait_or_cancel
from inweave.serve.jobs.image_request import Operation, fingerprint, png_size
from inweave.serve.jobs.job import Failure, Job
from inweave.serve.service import Service

router = APIRouter(prefix="/v1/images")
_USAGE = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0,
          "input_tokens_details": {"image_tokens": 0, "text_tokens": 0}}  # fmt: skip
_EXAMPLE = {"prompt": "a red apple", "size": "128x128"}


@router.post("/generations", responses=MAY_BE_BUSY, openapi_extra=json_body_of(ImagesGeneration, _EXAMPLE))
async def generations(request: Request) -> Response:
    body = await json_body(request)
    if not isinstance(body, Mapping):
        raise ConfigError("expected a JSON object with a prompt")
    return await _run(request, dict(body), "image_generation")


@router.post("/edits", responses=MAY_BE_BUSY, openapi_extra=form_body_of(ImagesEdit))
async def edits(request: Request) -> Response:
    service = service_of(request)
    async with request.form(max_files=20, max_fields=500, max_part_size=service.settings.body_bytes) as form:
        fields = await form_fields(form)
    operation: Operation = "image_inpaint" if "mask_image" in fields else "image_transform"
    images = fields.pop("images", [fields["image"]] if "image" in fields else [])
    if not images:
        raise ConfigError(Problem("image", "is required"))
    if not all(isinstance(image, str) for image in images):
        raise ConfigError(Problem("image", "expected a file"))
    model = service.models.name(_model_name(fields).partition("+")[0] or None)
    if await service.models.references(model):
        fields.pop("image", None)
        if operation == "image_transform":
            operation = "image_generation"
        else:
            fields["image"], *images = images
        fields["references"] = images
    elif len(images) > 1:
        raise ConfigError(Problem("image", f"{model} is not an edit model: one image is expected, got {len(images)}"))
    if "mask_image" in fields:
        fields["mask_image"] = await _white_where_transparent(service, fields["mask_image"])
    if "image" in fields:
        await _resize(service, fields)
    return await _run(request, fields, operation, edits=True)


async def _white_where_transparent(service: Service, text: str) -> str:
    from PIL import Image

    clean = await service.images.read(text, "mask")

    def convert() -> str:
        with Image.open(io.BytesIO(clean), formats=("PNG",)) as mask:
            if mask.mode != "RGBA":
                reason = "it has no transparent parts; the transparent part is what is repainted"
                raise RequestError(Problem("mask", reason))
            white = mask.getchannel("A").point(lambda alpha: 255 if alpha < 128 else 0)
        target = io.BytesIO()
        white.save(target, format="PNG")
        return base64.b64encode(target.getvalue()).decode()

    return await asyncio.to_thread(convert)


async def _resize(service: Service, fields: dict[str, Any]) -> None:
    """Resize images to the requested size: results have the size of the image they are made from."""
    size = dimensions(fields.get("size", "auto"))
    if size is None or not 64 <= min(size) <= max(size) <= MAX_SIDE:
        return  # the size of the image itself, or one that is refused
    names = [name for name in ("image", "mask_image") if name in fields]
    clean = [await service.images.read(fields[name], name.removesuffix("_image")) for name in names]
    if len({png_size(content) for content in clean}) > 1:
        raise ConfigError(Problem("mask", "it must have the size of the image"))
    for name, content in zip(names, clean, strict=True):
        resized = await asyncio.to_thread(resize_input, content, size, 1)
        fields[name] = base64.b64encode(resized).decode()


async def _run(request: Request, body: dict[str, Any], operation: Operation, *, edits: bool = False) -> Response:
    service = service_of(request)
    mark = fingerprint([operation, body])
    stream, output = body.pop("stream", None) or False, Output.take(body)
    if not isinstance(stream, bool):
        raise ConfigError(Problem("stream", "expected true or false"))
    if stream and output.url:
        reason = "a stream sends b64_json; addresses come in answers that are not streamed"
        raise ConfigError(Problem("response_format", reason))
    warnings = ignored_fields(body, stream)
    key = request.headers.get("idempotency-key")
    partial = partial_images(body)
    try:
        submission = image_request(body, operation, await _default_steps(service, body))
        job = await service.submit_image(
            submission, client=client_of(request), key=key[:200] if key else None, fingerprint=mark
        )
    except ConfigError as error:
        raise error.renamed(field_names(body)) from None
    if stream:
        return EventSourceResponse(_stream(service, job, output, edits, partial), ping=HEARTBEAT)
    ended = await wait_or_cancel(request, service, job, keep=key is not None)
    if ended.state == "cancelled":
        raise CancelledError("the job was cancelled")
    return JSONResponse(await _answer(request, ended, output, warnings))


async def _answer(request: Request, job: Job, output: Output, warnings: list[str]) -> dict[str, Any]:
    data = []
    for number, content in enumerate(await service_of(request).jobs.images(job)):
        if output.url:
            data.append({"url": str(request.base_url).rstrip("/") + f"/v1/jobs/{job.id}/files/{number}.png"})
        else:
            data.append({"b64_json": await asyncio.to_thread(output.encode, content)})
    result = job.result or {}
    return {
        "created": int(job.created), "data": data, "output_format": output.format, "size": _size(job),
        "background": "opaque", "quality": "auto", "usage": _USAGE, "job_id": job.id, "loras": result.get("loras", []),
        "warnings": [*warnings, *result.get("warnings", []), *job.request.get("warnings", [])],
    }  # fmt: skip


async def _default_steps(service: Service, body: Mapping[str, Any]) -> int:
    """Return the steps of a request that states none, estimated before it runs."""
    name = _model_name(body).partition("+")[0]
    defaults = (await service.models.facts(service.models.name(name or None)))["defaults"]
    return int(defaults["steps"]) if defaults else 20


def _model_name(body: Mapping[str, Any]) -> str:
    if not isinstance(name := body.get("model") or "", str):
        raise ConfigError(Problem("model", "expected the name of a model"))
    return name


async def _stream(
    service: Service, job: Job, output: Output, edits: bool, most: int | None
) -> AsyncIterator[ServerSentEvent]:
    """Yield partial images, at most ``most`` of them if the request says so, and the results."""
    prefix = "image_edit" if edits else "image_generation"
    common = {"created_at": int(job.created), "quality": "auto", "background": "opaque", "output_format": output.format}
    partial, ended = 0, False
    try:
        async for event in service.jobs.follow(job.id):
            if event.type == "preview" and (most is None or partial < most):
                content = base64.b64decode(event.data["image"])
                data = {**common, "b64_json": await asyncio.to_thread(output.encode, content), "size": "auto"}
                yield _sent(f"{prefix}.partial_image", {**data, "partial_image_index": partial})
                partial += 1
            elif event.type == "done":
                ended = True
                current = await service.jobs.get(job.id)
                for content in await service.jobs.images(current):
                    text = await asyncio.to_thread(output.encode, content)
                    data = {**common, "b64_json": text, "size": _size(current), "usage": _USAGE}
                    yield _sent(f"{prefix}.completed", data)
            elif event.type in ("failed", "cancelled"):
                ended = True
                failure = (await service.jobs.get(job.id)).error or Failure("cancelled", "cancelled")
                yield ServerSentEvent(json.dumps(render(400, failure, {})))
    finally:
        if not ended:  # the reader left
            await asyncio.shield(service.jobs.abandon(job.id))


def _sent(kind: str, data: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(json.dumps({"type": kind, **data}), event=kind)


def _size(job: Job) -> str:
    images = (job.result or {}).get("images") or [{}]
    return f"{images[0].get('width', 0)}x{images[0].get('height', 0)}"
