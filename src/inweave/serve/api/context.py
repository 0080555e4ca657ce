"""Shared by routes: the worker behind a request, its caller, and the documents of jobs."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field

from inweave.serve.jobs.accounts import CURRENT
from inweave.serve.jobs.job import Job
from inweave.serve.jobs.training_runs import run_of
from inweave.serve.service import Service

JobId = Annotated[str, Field(max_length=100)]


def service_of(request: Request) -> Service:
    """Return the worker that a request is for."""
    service: Service = request.app.state.service
    return service


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, for calls that concern only the caller's own jobs.

    Attributes:
        name: the X-Client-Id, or the user name of Basic authentication, whose password is the token; without either the
            address and the User-Agent.
        identified: False if several people may have this name: two programs of one kind behind one address.
    """

    name: str
    identified: bool


def caller_of(request: Request) -> Caller:
    """Return the caller of a request; the callers of one account have its name before their own."""
    caller = _caller_of(request)
    account = CURRENT.get()
    return caller if account is None else Caller(f"{account.name}: {caller.name}", caller.identified)


def _caller_of(request: Request) -> Caller:
    if name := request.headers.get("x-client-id", ""):
        return Caller(name[:200], True)
    if user := _user_name(request.headers.get("authorization", "")):
        return Caller(f"user {user[:200]}", True)
    address = request.client.host if request.client else ""
    return Caller(f"{address} {request.headers.get('user-agent', '')[:100]}".strip(), False)


def client_of(request: Request) -> str:
    """Return the name of the caller."""
    return caller_of(request).name


def _user_name(authorization: str) -> str:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value, validate=True).decode("utf-8").partition(":")[0]
    except ValueError:
        return ""


def job_urls(job: Job) -> dict[str, str]:
    """Return the addresses of a job."""
    return {"self": f"/v1/jobs/{job.id}", "events": f"/v1/jobs/{job.id}/events", "stream": f"/v1/jobs/{job.id}/stream"}


def accepted_document(job: Job) -> dict[str, Any]:
    """Return the answer to a submission."""
    return {"id": job.id, "state": job.state, "urls": job_urls(job)}


def job_document(job: Job, position: int | None = None) -> dict[str, Any]:
    """Return a job in the form that clients get."""
    result = None
    if job.result is not None:
        images = job.result.get("images", ())
        urls = [{**image, "url": f"/v1/jobs/{job.id}/files/{image['file']}"} for image in images]
        result = {**job.result, "images": urls}
    training = {"dataset": job.request.get("dataset"), "run": run_of(job)} if job.kind == "train" else {}
    return {
        "id": job.id, "operation": job.kind, "model": job.model, "state": job.state, "priority": job.priority,
        "position": position, "attempts": job.attempts, "cancel_requested": job.cancel, "created": job.created,
        "started": job.started, "finished": job.finished, "settings": job.request.get("config", {}),
        "warnings": job.request.get("warnings", []), "result": result,
        "error": job.error.as_dict() if job.error else None, "urls": job_urls(job), **training,
    }  # fmt: skip
