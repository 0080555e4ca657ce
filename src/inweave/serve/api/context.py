"""Shared by routes: the worker behind a request, its caller, and the documents of jobs."""

from __future__ import annotations

import base64
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field

from inweave.serve.jobs.job import Job
from inweave.serve.jobs.training_runs import run_of
from inweave.serve.service import Service

JobId = Annotated[str, Field(max_length=100)]


def service_of(request: Request) -> Service:
    """Return the worker that a request is for."""
    service: Service = request.app.state.service
    return service


def client_of(request: Request) -> str:
    """Return the name of the caller, for calls that concern only its own jobs.

    It is the X-Client-Id that it sends, or the user name of Basic authentication, whose password is the token; clients
    that send neither are known by their address, and those of one address share a name.
    """
    name = request.headers.get("x-client-id", "")[:200]
    if not name and (user := _user_name(request.headers.get("authorization", ""))):
        name = f"user {user[:200]}"
    return name or (request.client.host if request.client else "")


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
