"""The OpenAPI document: what routes that read their body themselves expect, with examples, and how errors look.

The fields of an image job are those of `ImageRequest` and of `GenerateConfig` side by side, as clients send them; models from
which FastAPI makes the rest need nothing here.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from inweave.generate.config import GenerateConfig
from inweave.serve.api.native.training_requests import TrainRequest
from inweave.serve.jobs.image_request import ImageRequest

_REF = "#/components/schemas/{model}"
_TEXT, _WHOLE, _NUMBER, _FLAG = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
_PICTURE = {"type": "string", "description": "a picture in base64, a data: address, or the id of an upload"}
_FILE = {"type": "string", "contentMediaType": "application/octet-stream", "format": "binary"}
_OBJECT: dict[str, Any] = {"type": "object"}
_A1111 = {
    "prompt": _TEXT, "negative_prompt": _TEXT, "seed": _WHOLE, "steps": _WHOLE, "cfg_scale": _NUMBER, "width": _WHOLE, "height": _WHOLE,
    "batch_size": _WHOLE, "n_iter": _WHOLE, "sampler_name": _TEXT, "sampler_index": _TEXT, "scheduler": _TEXT, "override_settings": _OBJECT,
    "override_settings_restore_afterwards": _FLAG, "disable_extra_networks": _FLAG, "send_images": _FLAG, "force_task_id": _TEXT,
    "infotext": _TEXT, "alwayson_scripts": _OBJECT, "on_mismatch": {"enum": ["error", "warn"]},
}  # fmt: skip
_MASKS = {
    "init_images": {"type": "array", "items": _PICTURE, "minItems": 1, "maxItems": 1}, "mask": _PICTURE, "denoising_strength": _NUMBER,
    "resize_mode": {"enum": [0, 1, 2, 3]}, "mask_blur": _WHOLE, "inpainting_fill": {"enum": [0, 1, 2, 3]},
    "inpaint_full_res": _FLAG, "inpaint_full_res_padding": _WHOLE, "inpainting_mask_invert": {"enum": [0, 1, True, False]},
    "include_init_images": _FLAG,
}  # fmt: skip
_OPENAI = {
    "prompt": _TEXT, "model": _TEXT, "n": _WHOLE, "size": {"type": "string", "pattern": r"^(auto|\d{1,5}x\d{1,5})$"}, "quality": _TEXT,
    "style": _TEXT, "background": {"enum": ["auto", "opaque"]}, "moderation": _TEXT, "user": _TEXT, "stream": _FLAG,
    "output_format": {"enum": ["png", "jpeg", "webp"]}, "output_compression": {"type": "integer", "minimum": 0, "maximum": 100},
    "response_format": {"enum": ["b64_json", "url"]}, "partial_images": {"type": "integer", "minimum": 0, "maximum": 3},
    "negative_prompt": _TEXT, "seed": _WHOLE, "steps": _WHOLE, "guidance_scale": _NUMBER, "sampler": _TEXT, "strength": _NUMBER,
}  # fmt: skip
_SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": {
        "type": "object", "required": ["error"],
        "description": "/sdapi has the code in error and the message in detail; other APIs have an object in error",
        "properties": {"error": {"anyOf": [_TEXT, {"type": "object", "required": ["code", "message"], "properties": {
            "code": _TEXT, "message": _TEXT, "problems": {"type": "array", "items": _TEXT}, "report": _OBJECT}}]}},
    },
    "JobAccepted": {
        "type": "object", "description": "id, state and urls; requests with hive_id are answered as rbee does",
        "properties": {"id": _TEXT, "state": _TEXT, "urls": _OBJECT, "job_id": _TEXT, "sse_url": _TEXT},
    },
    "Job": {
        "type": "object", "required": ["id", "operation", "model", "state", "urls"], "properties": {
            "id": _TEXT, "operation": _TEXT, "model": _TEXT, "state": {"enum": ["queued", "running", "done", "failed", "cancelled"]},
            "priority": _WHOLE, "position": {"type": ["integer", "null"]}, "attempts": _WHOLE, "cancel_requested": _FLAG, "created": _NUMBER,
            "started": {"type": ["number", "null"]}, "finished": {"type": ["number", "null"]}, "settings": _OBJECT,
            "warnings": {"type": "array", "items": _TEXT}, "result": {"type": ["object", "null"]},
            "error": {"type": ["object", "null"]}, "urls": _OBJECT},
    },
    "Txt2Img": {"type": "object", "properties": _A1111},
    "Img2Img": {"type": "object", "required": ["init_images"], "properties": {**_A1111, **_MASKS}},
    "ImagesGeneration": {"type": "object", "required": ["prompt"], "properties": _OPENAI},
    "ImagesEdit": {"type": "object", "required": ["prompt", "image"], "properties": {**_OPENAI, "image": _FILE, "mask": _FILE}},
    "PngInfo": {"type": "object", "required": ["image"], "properties": {"image": {**_PICTURE, "description": "in base64, or a data: address"}}},
    "Options": {"type": "object", "properties": {"sd_model_checkpoint": _TEXT, "CLIP_stop_at_last_layers": _WHOLE}},
    "TaskProgress": {"type": "object", "required": ["id_task"], "properties": {
        "id_task": _TEXT, "id_live_preview": _WHOLE, "live_preview": _FLAG}},
}  # fmt: skip
_LORA = {"name": "pixel", "strength": 0.8}
#: (method, path) -> media type, schema, example
_BODIES: dict[tuple[str, str], tuple[str, str, Any]] = {
    ("post", "/v1/jobs"): ("application/json", "", {"prompt": "a red apple", "seed": 7, "steps": 8, "loras": [_LORA]}),
    ("post", "/sdapi/v1/txt2img"): ("application/json", "Txt2Img", {"prompt": "a red apple <lora:pixel:0.8>", "steps": 8}),
    ("post", "/sdapi/v1/img2img"): ("application/json", "Img2Img", {"prompt": "a pear", "init_images": ["iVBORw0KGgo..."]}),
    ("post", "/sdapi/v1/png-info"): ("application/json", "PngInfo", {"image": "iVBORw0KGgo..."}),
    ("post", "/sdapi/v1/options"): ("application/json", "Options", {"sd_model_checkpoint": "inweave/emoji"}),
    ("post", "/internal/progress"): ("application/json", "TaskProgress", {"id_task": "task(1)"}),
    ("post", "/v1/images/generations"): ("application/json", "ImagesGeneration", {"prompt": "a red apple", "size": "128x128"}),
    ("post", "/v1/images/edits"): ("multipart/form-data", "ImagesEdit", None),
    ("post", "/v1/loras"): ("application/octet-stream", "", None),
    ("put", "/v1/datasets/{dataset}/pictures/{name}"): ("application/octet-stream", "", None),
}  # fmt: skip
#: answers that are no JSON, and those of jobs
_ANSWERS: dict[tuple[str, str], tuple[str, str]] = {
    ("post", "/v1/jobs"): ("application/json", "JobAccepted"), ("post", "/v1/jobs/{job_id}/retry"): ("application/json", "JobAccepted"),
    ("get", "/v1/jobs/{job_id}"): ("application/json", "Job"), ("patch", "/v1/jobs/{job_id}"): ("application/json", "Job"),
    ("get", "/v1/jobs/{job_id}/events"): ("text/event-stream", ""), ("get", "/v1/jobs/{job_id}/stream"): ("text/event-stream", ""),
    ("get", "/v1/jobs/{job_id}/files/{name}"): ("image/png", ""), ("post", "/v1/jobs/{job_id}/extend"): ("application/json", "JobAccepted"),
    ("get", "/v1/datasets/{dataset}/pictures/{name}"): ("image/png", ""), ("get", "/v1/uploads/{upload}/file"): ("image/png", ""),
    ("get", "/metrics"): ("text/plain", ""),
}  # fmt: skip


def describe_interface(app: FastAPI) -> dict[str, Any]:
    """The document, made once."""
    if app.openapi_schema is None:
        app.openapi_schema = _document(app)
    return app.openapi_schema


def _document(app: FastAPI) -> dict[str, Any]:
    about = (
        "Images with LoRAs: a durable queue, events that can be rejoined; also the APIs of AUTOMATIC1111 and OpenAI."
    )
    document = get_openapi(title=app.title, version=app.version, description=about, routes=app.routes)
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= _SCHEMAS
    schemas["ImageJob"] = _image_job(schemas)
    schemas["TrainJob"] = _model(TrainRequest, schemas)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete(operation, (method, path))
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document


def _complete(operation: dict[str, Any], route: tuple[str, str]) -> None:
    """Body, answer and errors of one operation."""
    responses: dict[str, Any] = operation["responses"]
    responses.pop("422", None)  # problems with requests are 400 here
    responses["4XX"] = {
        "description": "refused; the message says why",
        "content": _content("application/json", "Error"),
    }
    if route in _ANSWERS:
        success = next(code for code in responses if code.startswith("2"))
        responses[success]["content"] = _content(*_ANSWERS[route])
    if route in _BODIES:
        media, schema, example = _BODIES[route]
        content = _content(media, schema)
        if route == ("post", "/v1/jobs"):
            content[media]["schema"] = {
                "anyOf": [{"$ref": _REF.format(model=name)} for name in ("ImageJob", "TrainJob")]
            }
        if example is not None:
            content[media]["example"] = example
        operation["requestBody"] = {"required": True, "content": content}


def _content(media: str, schema: str) -> dict[str, Any]:
    described: dict[str, Any] = {"$ref": _REF.format(model=schema)} if schema else dict(_FILE)
    if media.startswith("text/"):
        described = _TEXT
    return {media: {"schema": described}}


def _image_job(schemas: dict[str, Any]) -> dict[str, Any]:
    """One flat object: the settings of the image stand beside the fields of the request."""
    settings, request = _model(GenerateConfig, schemas), _model(ImageRequest, schemas)
    own = {name: value for name, value in request["properties"].items() if name != "settings"}
    properties = {name: value for name, value in settings["properties"].items() if name not in ("init", "mask")}
    names = {"name": _TEXT, "path": _TEXT, "hash": _TEXT, "strength": _NUMBER, "te": _NUMBER, "unet": _NUMBER}
    properties["loras"] = {
        "type": "array", "description": "of the library, by name, path or hash",
        "items": {"anyOf": [_TEXT, {"type": "object", "properties": names}]},
    }  # fmt: skip
    return {
        "type": "object",
        "required": ["prompt"],
        "description": "an image job",
        "properties": {**own, **properties},
    }


def _model(model: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    document = model.model_json_schema(ref_template=_REF)
    schemas |= document.pop("$defs", {})
    return document
