"""The native API.

POST   /v1/jobs                     202 {id, state, urls}; rbee's clients (with `hive_id`) get {job_id, sse_url}
GET    /v1/jobs                     newest first, paged with `before`
GET    /v1/jobs/{id}                state, position, result, error; 410 once it has expired
PATCH  /v1/jobs/{id}                {priority}, or {position}: a place among the waiting ones, 0 runs next
DELETE /v1/jobs/{id}                cancel; ?forget=true removes one that has ended
POST   /v1/jobs/{id}/retry          a new job with the same request; training that was cut short goes on
GET    /v1/jobs/{id}/events         server-sent events, `Last-Event-ID` resumes
GET    /v1/jobs/{id}/stream         the same in rbee's words
GET    /v1/jobs/{id}/files/{name}   a picture of the result; DELETE removes it, and the job with its last one
GET, POST /v1/queue                 see `queue_routes`
GET    /v1/loras, /v1/loras/{ref}, /v1/loras/{ref}/preview; POST /v1/loras/check, /v1/loras/refresh
GET    /v1/capabilities, /info, /health, /ready, /metrics
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel, Field, model_validator
from sse_starlette import EventSourceResponse, ServerSentEvent

from inweave.errors import ConfigError, Problem
from inweave.formats.dialects import written_dialects
from inweave.models.samplers import offered_samplers, offered_schedules
from inweave.serve.api import event_streams as streams
from inweave.serve.api.json_body import JsonRoute, json_body
from inweave.serve.api.native.metrics import metrics_text
from inweave.serve.api.rbee.events import contract_fields, device_label, rbee_event
from inweave.serve.jobs.errors import GoneError
from inweave.serve.jobs.image_request import ImageRequest, fingerprint
from inweave.serve.jobs.job import Job, State, StoredEvent
from inweave.serve.jobs.training_runs import run_of
from inweave.serve.service import Service
from inweave.serve.storage.datasets import MAX_DATASETS, MAX_IMAGES
from inweave.targets.bases import KNOWN
from inweave.version import __version__

router = APIRouter(route_class=JsonRoute)
RBEE = "rbee"  # marks the jobs of its clients
JobId = Annotated[str, Field(max_length=100)]


class JobChange(BaseModel):
    """Another place in the queue: by priority, or by position (0 runs next)."""

    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    position: Annotated[int, Field(ge=0, le=1_000_000)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> JobChange:
        if (self.priority is None) == (self.position is None):
            raise ValueError("either priority or position is needed")
        return self


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.post("/v1/jobs", status_code=202)
async def submit(
    request: Request, idempotency_key: Annotated[str | None, Header(max_length=200)] = None
) -> JSONResponse:
    """Queue a job: generate, transform or inpaint images, or train a LoRA."""
    service = service_of(request)
    body = await json_body(request)
    client = client_of(request)
    if isinstance(body, dict) and body.get("operation", body.get("kind")) == "train":
        from inweave.serve.api.native.training_requests import submit_training

        job, _ = await submit_training(service, body, client=client, key=idempotency_key)
    else:
        contract = isinstance(body, dict) and "hive_id" in body
        image = ImageRequest.parse(contract_fields(body) if contract else body)
        client = f"{RBEE} {client}" if contract else client
        job, _ = await service.submit_image(image, client=client, key=idempotency_key, fingerprint=fingerprint(body))
    if isinstance(body, dict) and "hive_id" in body:
        return JSONResponse({"job_id": job.id, "sse_url": f"/v1/jobs/{job.id}/stream"}, 200)
    urls = job_urls(job)
    return JSONResponse({"id": job.id, "state": job.state, "urls": urls}, 202, headers={"Location": urls["self"]})


def client_of(request: Request) -> str:
    """Who asks, for calls that concern only a caller's own jobs."""
    return request.headers.get("x-client-id", "")[:200] or (request.client.host if request.client else "")


def job_urls(job: Job) -> dict[str, str]:
    return {"self": f"/v1/jobs/{job.id}", "events": f"/v1/jobs/{job.id}/events", "stream": f"/v1/jobs/{job.id}/stream"}


async def present(service: Service, job_id: str) -> Job:
    """The job; `MissingError` for one that never was, `GoneError` for one that expired."""
    job = await asyncio.to_thread(service.store.job, job_id)
    if job.expired:
        raise GoneError(f"job {job.id} ended as {job.state}; its results have expired")
    return job


def job_document(job: Job, position: int | None = None) -> dict[str, Any]:
    """A job as clients see it."""
    result = None
    if job.result is not None:
        result = {**job.result}
        result["images"] = [
            {**image, "url": f"/v1/jobs/{job.id}/files/{image['file']}"} for image in job.result.get("images", ())
        ]
    training = {"dataset": job.request.get("dataset"), "run": run_of(job)} if job.kind == "train" else {}
    return {
        "id": job.id, "operation": job.kind, "model": job.model, "state": job.state, "priority": job.priority,
        "position": position, "attempts": job.attempts, "cancel_requested": job.cancel, "created": job.created,
        "started": job.started, "finished": job.finished, "settings": job.request.get("config", {}),
        "warnings": job.request.get("warnings", []), "result": result,
        "error": job.error.as_dict() if job.error else None, "urls": job_urls(job), **training,
    }  # fmt: skip


@router.get("/v1/jobs")
async def list_jobs(
    request: Request,
    state: Annotated[list[State] | None, Query()] = None,
    before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> dict[str, Any]:
    store = service_of(request).store
    jobs = await asyncio.to_thread(store.jobs, states=tuple(state or ()), before=before, limit=limit)
    documents = [job_document(job, await asyncio.to_thread(store.position, job)) for job in jobs]
    return {"jobs": documents, "next": jobs[-1].number if len(jobs) == limit else None, "paused": store.paused}


@router.get("/v1/jobs/{job_id}")
async def get_job(request: Request, job_id: JobId) -> dict[str, Any]:
    service = service_of(request)
    job = await present(service, job_id)
    return job_document(job, await asyncio.to_thread(service.store.position, job))


@router.patch("/v1/jobs/{job_id}")
async def change_job(request: Request, job_id: JobId, change: JobChange) -> dict[str, Any]:
    service = service_of(request)
    await present(service, job_id)
    if change.position is not None:
        job = await asyncio.to_thread(service.store.move, job_id, change.position)
    else:
        job = await asyncio.to_thread(service.store.prioritize, job_id, change.priority or 0)
    return job_document(job, await asyncio.to_thread(service.store.position, job))


@router.delete("/v1/jobs/{job_id}")
async def cancel_job(request: Request, job_id: JobId, forget: bool = False) -> dict[str, Any]:
    service = service_of(request)
    await present(service, job_id)
    if forget:
        await asyncio.to_thread(service.store.delete, job_id)
        return {"job_id": job_id, "status": "forgotten"}
    job = await service.cancel(job_id)
    status = "cancelled" if job.state == "cancelled" or job.client.startswith(f"{RBEE} ") else "cancelling"
    return {"job_id": job.id, "status": status, "state": job.state}


@router.post("/v1/jobs/{job_id}/retry", status_code=202)
async def retry_job(request: Request, job_id: JobId) -> dict[str, Any]:
    service = service_of(request)
    await present(service, job_id)
    job, _ = await service.submit(await asyncio.to_thread(service.store.retry, job_id))
    return {"id": job.id, "state": job.state, "urls": job_urls(job)}


@router.get("/v1/jobs/{job_id}/events")
async def job_events(
    request: Request, job_id: JobId, last_event_id: Annotated[str | None, Header(max_length=30)] = None
) -> EventSourceResponse:
    service = service_of(request)
    job = await present(service, job_id)
    return streams.event_stream(service, job, _event_number(last_event_id), streams.native)


@router.get("/v1/jobs/{job_id}/stream")
async def job_stream(
    request: Request, job_id: JobId, last_event_id: Annotated[str | None, Header(max_length=30)] = None
) -> EventSourceResponse:
    service = service_of(request)
    job = await present(service, job_id)
    files = service.store.files.folder(job.id)

    def translate(job: Job, event: StoredEvent) -> Iterable[ServerSentEvent]:
        return rbee_event(event, files)

    return streams.event_stream(service, job, _event_number(last_event_id), translate)


def _event_number(text: str | None) -> int:
    if text is None or text == "":
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 15:
        raise ConfigError(Problem("Last-Event-ID", f"expected the number of an event, got {text[:20]!r}"))
    return int(text)


@router.get("/v1/jobs/{job_id}/files/{name}")
@router.head("/v1/jobs/{job_id}/files/{name}", include_in_schema=False)
async def job_file(request: Request, job_id: JobId, name: Annotated[str, Field(max_length=100)]) -> FileResponse:
    service = service_of(request)
    job = await present(service, job_id)
    path = await asyncio.to_thread(service.store.files.result, job.id, name)
    kind = "image/png" if path.suffix == ".png" else "application/octet-stream"
    return FileResponse(
        path, media_type=kind, headers={"Content-Disposition": f'inline; filename="{job.id}-{path.name}"'}
    )


@router.delete("/v1/jobs/{job_id}/files/{name}")
async def delete_job_file(
    request: Request, job_id: JobId, name: Annotated[str, Field(max_length=100)]
) -> dict[str, Any]:
    service = service_of(request)
    await present(service, job_id)
    await asyncio.to_thread(service.store.delete_image, job_id, name)
    return {"job_id": job_id, "deleted": name}


@router.get("/v1/capabilities")
async def capabilities(request: Request) -> dict[str, Any]:
    service = service_of(request)
    limits = service.settings
    return {
        "version": __version__,
        "operations": ["image_generation", "image_transform", "image_inpaint", *(["train"] if limits.allow_train else [])],
        "models": [
            {"name": name, "default": name == service.model(None), **await service.model_facts(name)}
            for name in service.models
        ],
        "samplers": list(offered_samplers()), "schedules": list(offered_schedules()),
        "bases": [known.name for known in KNOWN], "dialects": written_dialects(),
        "features": ["lora", "lora_by_hash", "preview", "cancel", "events_resume", "idempotency_key", "priority", "uploads"],
        "limits": {
            "queue": limits.queue_limit, "body_bytes": limits.body_bytes, "lora_bytes": limits.lora_bytes, "image_pixels": limits.image_pixels,
            "images_per_job": limits.max_images, "job_seconds": limits.job_seconds, "keep_hours": limits.keep_hours,
            "uploads": limits.upload_count, "upload_bytes": int(limits.upload_gb * 1024**3),
            "datasets": MAX_DATASETS, "pictures_per_dataset": MAX_IMAGES, "dataset_bytes": int(limits.dataset_gb * 1024**3),
        },
    }  # fmt: skip


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health() -> dict[str, Any]:
    return {"status": "healthy", "timestamp": _now()}


@router.get("/ready")
@router.get("/v1/ready")
@router.head("/ready", include_in_schema=False)
@router.head("/v1/ready", include_in_schema=False)
async def ready(request: Request) -> JSONResponse:
    able, reason = service_of(request).readiness
    body = {"ready": able, "timestamp": _now()} | ({} if able else {"reason": reason})
    return JSONResponse(body, 200 if able else 503)


@router.get("/info")
async def info(request: Request) -> dict[str, Any]:
    """What rbee's contracts call WorkerInfo."""
    service = service_of(request)
    states = {"loading": "starting", "failed": "stopped"}
    status = service.dispatchers[0].status
    busy = any(each.current is not None for each in service.dispatchers)
    identity: dict[str, Any] = request.app.state.identity
    return {
        "id": identity.get("worker_id") or f"worker-inweave-{identity['port']}", "model_id": service.model(None),
        "device": device_label(service.dispatchers[0].device), "port": identity["port"],
        "status": "busy" if busy else states.get(status, status), "implementation": "inweave", "version": __version__,
    }  # fmt: skip


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    text = await asyncio.to_thread(metrics_text, service_of(request))
    return Response(text, media_type="text/plain; version=0.0.4")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()
