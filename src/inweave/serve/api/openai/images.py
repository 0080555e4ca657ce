"""OpenAI's images API: generations, edits, models; with streaming.

    POST /v1/images/generations   JSON; extra fields are ours: loras, negative_prompt, seed, steps, guidance, sampler, ...
    POST /v1/images/edits         multipart; transparent parts of the mask are repainted
    GET  /v1/models               models, and every LoRA as "<model>+<lora>" with its parent

`model` may be "<model>+<lora>:<strength>+...", for clients that offer nothing but the name of a model. A caller that hangs up
cancels its job, because nobody else could fetch the result.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.datastructures import FormData, UploadFile

from inweave.errors import ConfigError, Problem, RequestError
from inweave.generate.config import parse_loras
from inweave.serve.api.a1111.images import resize_input
from inweave.serve.api.event_streams import HEARTBEAT, follow
from inweave.serve.api.json_body import json_body, parse_json
from inweave.serve.api.native.jobs import client_of, service_of
from inweave.serve.api.waiting import finished_images, wait_or_cancel
from inweave.serve.jobs.image_request import ImageRequest, fingerprint, named_as, png_size
from inweave.serve.jobs.job import Failure, Job
from inweave.serve.service import Service

router = APIRouter()
#: fields of OpenAI's that have no effect here -> the values with which none is expected; the answer names the others
_IGNORED: dict[str, tuple[str, ...] | None] = {
    "quality": ("auto", "standard"), "style": (), "background": ("auto", "opaque"), "moderation": None, "user": None,
    "input_fidelity": ("low",),
}  # fmt: skip
#: our names in problems -> OpenAI's
_FIELD_NAMES = {"count": "n", "mask_image": "mask"}
_NUMBERS = ("n", "seed", "steps", "guidance", "guidance_scale", "strength", "width", "height", "partial_images",
            "output_compression", "feather", "clip_skip")  # fmt: skip
_BRACKET = re.compile(r"loras\[\d*\]\[(name|path|hash|weight|scale|strength|te|unet)\]")
_FORMATS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP"}
_USAGE = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0,
          "input_tokens_details": {"image_tokens": 0, "text_tokens": 0}}  # fmt: skip
MAX_SIDE = 4096


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    service = service_of(request)
    created = int(service.started)
    rows = [{"id": name, "object": "model", "created": created, "owned_by": "inweave"} for name in service.models]
    for entry in await asyncio.to_thread(service.library.entries, limit=1000):
        for name in service.models:
            if not entry.health and await service.fits_by_header(entry, name):
                rows.append({**rows[0], "id": f"{name}+{entry.name}", "parent": name})
    return {"object": "list", "data": rows}


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """One model, or one with LoRAs: "<model>+<lora>"."""
    service = service_of(request)
    base, plus, stack = model.partition("+")
    name = service.model(base)
    choices = parse_loras(stack.split("+")) if plus else ()
    await service.find_loras(choices)
    row = {"id": f"{name}{plus}{stack}", "object": "model", "created": int(service.started), "owned_by": "inweave"}
    return row | ({"parent": name} if plus else {})


@router.post("/v1/images/generations")
async def generations(request: Request) -> Response:
    body = await json_body(request)
    if not isinstance(body, Mapping):
        raise ConfigError("expected a JSON object with a prompt")
    return await _run(request, dict(body), "image_generation")


@router.post("/v1/images/edits")
async def edits(request: Request) -> Response:
    async with request.form(
        max_files=20, max_fields=500, max_part_size=service_of(request).settings.body_bytes
    ) as form:
        fields = await _form_fields(form)
    operation = "image_inpaint" if "mask_image" in fields else "image_transform"
    if "image" not in fields:
        raise ConfigError(Problem("image", "is required"))
    if not isinstance(fields["image"], str):
        raise ConfigError(Problem("image", "expected a file"))
    if "mask_image" in fields:
        fields["mask_image"] = await _white_where_transparent(service_of(request), fields["mask_image"])
    await _resize(service_of(request), fields)
    return await _run(request, fields, operation)


async def _form_fields(form: FormData) -> dict[str, Any]:
    """The fields of a multipart body: pictures in base64, numbers as numbers, LoRAs in any of three forms."""
    fields: dict[str, Any] = {}
    pairs: list[tuple[str, str]] = []
    images: list[UploadFile] = []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name in ("image", "image[]"):
                images.append(value)
            elif name == "mask":
                fields["mask_image"] = base64.b64encode(await value.read()).decode()
            else:
                raise ConfigError(Problem(name[:100], "there is no such file field; send image and mask"))
        elif match := _BRACKET.fullmatch(name):
            pairs.append((match[1], value))
        elif name == "loras":
            fields["loras"] = _json_part(value)
        elif name in _NUMBERS:
            fields[name] = _number(name, value)
        elif name == "stream":
            fields[name] = {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower(), value)
        else:
            fields[name] = value
    if len(images) > 1:
        raise ConfigError(Problem("image", f"one picture is expected, got {len(images)}"))
    if images:
        fields["image"] = base64.b64encode(await images[0].read()).decode()
    if pairs:
        fields["loras"] = _paired(pairs)
    return fields


def _json_part(text: str) -> Any:
    try:
        return parse_json(text)
    except ConfigError:
        return [part.strip() for part in text.split(",") if part.strip()]


def _number(name: str, text: str) -> float | int:
    try:
        return int(text) if re.fullmatch(r"[+-]?\d{1,25}", text.strip()) else float(text)
    except (ValueError, OverflowError):
        raise ConfigError(Problem(name, f"expected a number, got {text[:40]!r}")) from None


def _paired(pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """`loras[][name]`, `loras[][weight]`: the first name goes with the first weight, and so on."""
    columns: dict[str, list[Any]] = {}
    for name, value in pairs:
        name = {"weight": "strength", "scale": "strength"}.get(name, name)
        parsed = value if name in ("name", "path", "hash") else _number(f"loras.{name}", value)
        columns.setdefault(name, []).append(parsed)
    if len({len(column) for column in columns.values()}) != 1:
        raise ConfigError(Problem("loras", "every LoRA needs the same fields in this form; or send one field of JSON"))
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


async def _white_where_transparent(service: Service, text: str) -> str:
    from PIL import Image

    clean = await service.picture(text, "mask")

    def convert() -> str:
        with Image.open(io.BytesIO(clean), formats=("PNG",)) as mask:
            if mask.mode != "RGBA":
                raise RequestError(
                    Problem("mask", "it has no transparent parts; the transparent part is what is repainted")
                )
            white = mask.getchannel("A").point(lambda alpha: 255 if alpha < 128 else 0)
        target = io.BytesIO()
        white.save(target, format="PNG")
        return base64.b64encode(target.getvalue()).decode()

    return await asyncio.to_thread(convert)


async def _resize(service: Service, fields: dict[str, Any]) -> None:
    """Pictures at the size that was asked for: results have the size of the picture they are made from."""
    size = _dimensions(fields.get("size", "auto"))
    if size is None or not 64 <= min(size) <= max(size) <= MAX_SIDE:
        return  # the size of the picture itself, or one that is refused
    names = [name for name in ("image", "mask_image") if name in fields]
    clean = [await service.picture(fields[name], name.removesuffix("_image")) for name in names]
    if len({png_size(content) for content in clean}) > 1:
        raise ConfigError(Problem("mask", "it must have the size of the image"))
    for name, content in zip(names, clean, strict=True):
        resized = await asyncio.to_thread(resize_input, content, size, 1)
        fields[name] = base64.b64encode(resized).decode()


async def _run(request: Request, body: dict[str, Any], operation: str) -> Response:
    service = service_of(request)
    mark = fingerprint([operation, body])
    stream, output = body.pop("stream", None) or False, _Output.of(body)
    if not isinstance(stream, bool):
        raise ConfigError(Problem("stream", "expected true or false"))
    if stream and output.url:
        raise ConfigError(
            Problem("response_format", "a stream sends b64_json; addresses come in answers that are not streamed")
        )
    warnings = _ignored_fields(body, stream)
    key = request.headers.get("idempotency-key")
    with named_as(_FIELD_NAMES | ({"width": "size", "height": "size"} if "size" in body else {})):
        image = _image_request(body, operation)
        job, _ = await service.submit_image(
            image, client=client_of(request), key=key[:200] if key else None, fingerprint=mark
        )
    if stream:
        return EventSourceResponse(_stream(service, job, output, operation), ping=HEARTBEAT)
    ended = await wait_or_cancel(request, service, job, keep=key is not None)
    files = await finished_images(service, ended)
    data = []
    for number, content in enumerate(files):
        if output.url:
            data.append({"url": str(request.base_url).rstrip("/") + f"/v1/jobs/{job.id}/files/{number}.png"})
        else:
            data.append({"b64_json": await asyncio.to_thread(output.encode, content)})
    answer = {
        "created": int(ended.created), "data": data, "output_format": output.format, "size": _size(ended),
        "background": "opaque", "quality": "auto", "usage": _USAGE, "job_id": job.id,
        "loras": (ended.result or {}).get("loras", []),
        "warnings": [*warnings, *(ended.result or {}).get("warnings", []), *ended.request.get("warnings", [])],
    }  # fmt: skip
    return JSONResponse(answer)


def _ignored_fields(body: Mapping[str, Any], stream: bool) -> list[str]:
    """A line per field that has no effect; a transparent background cannot be made, so it is an error."""
    if wrong := [name for name in _IGNORED if not isinstance(body.get(name), str | None)]:
        raise ConfigError([Problem(name, "expected text") for name in wrong])
    if body.get("background") not in (None, "auto", "opaque"):
        raise ConfigError(Problem("background", "only opaque (or auto) can be made here"))
    lines = []
    for name, expected in _IGNORED.items():
        if expected is not None and body.get(name) is not None and body[name] not in expected:
            lines.append(f"{name} has no effect here")
    if body.get("partial_images") and not stream:
        lines.append("partial_images has no effect without stream")
    return lines


def _dimensions(size: object) -> tuple[int, int] | None:
    """(width, height), or nothing for "auto"."""
    if size in ("auto", "", None):
        return None
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", size) if isinstance(size, str) else None
    if match is None:
        raise ConfigError(Problem("size", "expected WIDTHxHEIGHT, such as 512x512, or auto"))
    return int(match[1]), int(match[2])


def _image_request(body: dict[str, Any], operation: str) -> ImageRequest:
    fields = {name: value for name, value in body.items() if name not in _IGNORED and value is not None}
    partial = fields.pop("partial_images", 0)
    if not isinstance(partial, int) or isinstance(partial, bool) or not 0 <= partial <= 3:
        raise ConfigError(Problem("partial_images", "expected a number from 0 to 3"))
    if partial:
        steps = fields.get("steps")
        fields["preview_every"] = max(1, (steps if isinstance(steps, int) and steps > 0 else 20) // (partial + 1))
    if "n" in fields:
        fields["count"] = fields.pop("n")
    if (size := _dimensions(fields.pop("size", "auto"))) is not None:
        fields["width"], fields["height"] = size
    model, plus, stack = str(fields.pop("model", "") or "").partition("+")
    if model:
        fields["model"] = model
    if plus:
        listed = fields.get("loras") or []
        fields["loras"] = [*(listed if isinstance(listed, list) else [listed]), *stack.split("+")]
    return ImageRequest.parse({**fields, "operation": operation})


async def _stream(service: Service, job: Job, output: _Output, operation: str) -> AsyncIterator[ServerSentEvent]:
    prefix = "image_edit" if operation != "image_generation" else "image_generation"
    common = {"created_at": int(job.created), "quality": "auto", "background": "opaque", "output_format": output.format}
    partial, ended = 0, False
    try:
        async for event in follow(service, job):
            if event.type == "preview":
                content = base64.b64decode(event.data["image"])
                data = {**common, "b64_json": await asyncio.to_thread(output.encode, content), "size": "auto"}
                yield _sent(f"{prefix}.partial_image", {**data, "partial_image_index": partial})
                partial += 1
            elif event.type == "done":
                ended = True
                current = await asyncio.to_thread(service.store.job, job.id)
                for content in await finished_images(service, current):
                    text = await asyncio.to_thread(output.encode, content)
                    data = {**common, "b64_json": text, "size": _size(current), "usage": _USAGE}
                    yield _sent(f"{prefix}.completed", data)
            elif event.type in ("failed", "cancelled"):
                ended = True
                current = await asyncio.to_thread(service.store.job, job.id)
                failure = current.error or Failure("cancelled", "cancelled")
                yield ServerSentEvent(json.dumps({"error": error_body(failure)}))
    finally:
        if not ended:  # the reader left
            await asyncio.shield(service.abandon(job.id))


def _sent(kind: str, data: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(json.dumps({"type": kind, **data}), event=kind)


def error_body(failure: Failure, status: int = 400) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    ours = status >= 500
    kind = "server_error" if ours else "invalid_request_error"
    return {"message": failure.message, "type": kind, "param": None if ours else failure.field, "code": failure.code}


def _size(job: Job) -> str:
    images = (job.result or {}).get("images") or [{}]
    return f"{images[0].get('width', 0)}x{images[0].get('height', 0)}"


class _Output:
    """How pictures are sent: format, quality, in the answer or as an address."""

    def __init__(self, kind: str, quality: int, url: bool) -> None:
        self.format, self._quality, self.url = kind, quality, url

    @staticmethod
    def of(body: dict[str, Any]) -> _Output:
        kind = body.pop("output_format", None) or "png"
        quality = body.pop("output_compression", None)
        where = body.pop("response_format", None) or "b64_json"
        problems = []
        if kind not in _FORMATS:
            problems.append(Problem("output_format", f"expected one of {', '.join(_FORMATS)}"))
        if quality is not None and (
            not isinstance(quality, int) or isinstance(quality, bool) or not 0 <= quality <= 100
        ):
            problems.append(Problem("output_compression", "expected a number from 0 to 100"))
        if where not in ("url", "b64_json"):
            problems.append(Problem("response_format", "expected url or b64_json"))
        if quality is not None and kind == "png":
            problems.append(Problem("output_compression", "only for jpeg and webp"))
        if where == "url" and kind != "png":
            problems.append(Problem("response_format", "files are png; ask for b64_json to have another output_format"))
        if problems:
            raise ConfigError(problems)
        return _Output(kind, 95 if quality is None else quality, where == "url")

    def encode(self, content: bytes) -> str:
        """A PNG of ours in the format that was asked for, in base64."""
        if self.format != "png":
            from PIL import Image

            target = io.BytesIO()
            with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
                image.convert("RGB").save(target, format=_FORMATS[self.format], quality=self._quality)
            content = target.getvalue()
        return base64.b64encode(content).decode()
