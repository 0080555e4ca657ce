"""The native API, and rbee's worker contract."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from inweave.serve.api.errors import Api
from inweave.serve.api.native import datasets, gallery, images, jobs, loras, prompts, queue, status, training, uploads
from inweave.serve.api.rbee import routes as rbee
from inweave.serve.http import sessions
from inweave.serve.jobs.job import Failure


class ErrorBody(BaseModel):
    """The code for programs, the message for people; problems by themselves, the report on a LoRA that does not fit."""

    code: str
    message: str
    problems: list[str] = []
    report: dict[str, Any] = {}


class Error(BaseModel):
    """The body of an answer that is an error."""

    error: ErrorBody


def render(status: int, failure: Failure, more: dict[str, Any]) -> dict[str, Any]:
    """Return the body of an answer that is an error."""
    return {"error": {**failure.as_dict(), **more}}


API = Api(
    (
        jobs.router, queue.router, gallery.router, loras.router, loras.conversions, datasets.router, training.router,
        images.router, uploads.router, prompts.router, status.router, rbee.router, sessions.router,
    ),
    Error, render,
)  # fmt: skip
