"""Bodies of the native API: image jobs as clients send them, and answers that describe jobs.

The fields of an image job are those of `ImageRequest` and of `GenerateConfig` side by side.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, create_model

from inweave.generate.config import GenerateConfig
from inweave.serve.api.openapi import MAY_BE_BUSY
from inweave.serve.jobs.image_request import ImageRequest
from inweave.serve.jobs.job import State


class LoraReference(BaseModel):
    """A LoRA of the library, and how strongly it is applied."""

    name: str | None = None
    path: str | None = None
    hash: str | None = None
    strength: float | None = None
    te: float | None = None
    unet: float | None = None


_FIELDS: dict[str, Any] = {
    name: (field.annotation, field)
    for model in (ImageRequest, GenerateConfig)
    for name, field in model.model_fields.items()
    if name not in ("settings", "init", "mask", "loras") and (model is ImageRequest or name != "references")
}
ImageJob = create_model(
    "ImageJob",
    __doc__="An image job.",
    loras=(list[str | LoraReference], Field(default=[], description="of the library, by name, path or hash")),
    **_FIELDS,
)


class JobAccepted(BaseModel):
    """A job that was queued; requests with hive_id are answered in rbee's form: job_id and sse_url."""

    id: str | None = None
    state: State | None = None
    urls: dict[str, str] | None = None
    job_id: str | None = None
    sse_url: str | None = None


class JobDocument(BaseModel):
    """A job and its result."""

    id: str
    operation: str
    model: str
    state: State
    priority: int = 0
    position: int | None = None
    attempts: int = 0
    cancel_requested: bool = False
    created: float = 0
    started: float | None = None
    finished: float | None = None
    settings: dict[str, Any] = {}
    warnings: list[str] = []
    result: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    urls: dict[str, str]
    dataset: str | None = Field(default=None, description="of a train job")
    run: str | None = Field(default=None, description="of a train job")


ACCEPTED: dict[int | str, dict[str, Any]] = {202: {"model": JobAccepted}, **MAY_BE_BUSY}
JOB: dict[int | str, dict[str, Any]] = {200: {"model": JobDocument}}
