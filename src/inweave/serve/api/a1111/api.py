"""AUTOMATIC1111's API, as far as clients use it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from inweave.serve.api.a1111 import extras, generate, lists, options, progress
from inweave.serve.api.errors import Api
from inweave.serve.jobs.job import Failure


class SdError(BaseModel):
    """The body of an answer that is an error: the code in `error`, the message in `detail` and `errors`."""

    error: str
    detail: str
    body: str
    errors: str
    problems: list[str] = []
    report: dict[str, Any] = {}


def render(status: int, failure: Failure, more: dict[str, Any]) -> dict[str, Any]:
    """Return the body of an answer that is an error."""
    return {"error": failure.code, "detail": failure.message, "body": "", "errors": failure.message, **more}


API = Api((generate.router, extras.router, lists.router, options.router, progress.router), SdError, render)
