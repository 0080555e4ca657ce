"""Errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from inweave.serve.jobs.job import Failure


class OpenAIErrorBody(BaseModel):
    """An error of OpenAI's API; `problems` and `report` are ours."""

    message: str
    type: str
    param: str | None
    code: str
    problems: list[str] = []
    report: dict[str, Any] = {}


class OpenAIError(BaseModel):
    """The body of an answer that is an error."""

    error: OpenAIErrorBody


def render(status: int, failure: Failure, more: dict[str, Any]) -> dict[str, Any]:
    """Return the body of an answer that is an error; ``param`` is the field at fault, unless the worker is."""
    ours = status >= 500
    kind = "server_error" if ours else "invalid_request_error"
    return {"error": {**more, **failure.as_dict(), "type": kind, "param": None if ours else failure.field}}
