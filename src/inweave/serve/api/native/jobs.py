"""Jobs.

POST   /v1/jobs                     202 {id, state, urls}; rbee's clients (with `hive_id`) get {job_id, sse_url}
GET    /v1/jobs                     newest first, paged with `before`
GET    /v1/jobs/{id}                state, position, result, error; 410 once it has expired
PATCH  /v1/jobs/{id}                {priority}, or {position}: a place among the waiting ones, 0 runs next
DELETE /v1/jobs/{id}                cancel; ?forget=true removes one that has ended
POST   /v1/jobs/{id}/retry          a new job with the same request; training that was cut short goes on
GET    /v1/jobs/{id}/events         server-sent events, `Last-Event-ID` resumes
GET    /v1/jobs/{id}/files/{name}   an image of the result; DELETE removes it, and the job with its last one

DELETE of an image also moves the caller's copy of it in the gallery into the trash, from which it can be restored;
?keep=true leaves that copy. Jobs that expire or are forgotten leave their images in the gallery.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel, Field, model_validator
from sse_starlette import EventSourceResponse

from inweave.serve.api import event_streams as streams
from inweave.serve.api.context import JobId, accepted_document, client_of, job_document, service_of
from inweave.serve.api.json_body import JsonRoute, json_body
from inweave.serve.api.native.documents import ACCEPTED, JOB, ImageJob
from inweave.serve.api.native.training_requests import TrainJob, submit_training
from inweave.serve.api.openapi import answer_of, json_body_of
from inweave.serve.api.rbee.events import RBEE, contract_fields
from inweave.serve.jobs.image_request import ImageRequest, fingerprint
from inweave.serve.jobs.job import State

router = APIRouter(prefix="/v1/jobs", route_class=JsonRoute)
FileName = Annotated[str, Field(max_length=100)]
_EXAMPLE = {"prompt": "a red apple", "seed": 7, "steps": 8, "loras": [{"name": "pixel", "strength": 0.8}]}


class JobChange(BaseModel):
    """Another place in the queue: by priority, or by position (0 runs next)."""

    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    position: Annotated[int, Field(ge=0, le=1_000_000)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> JobChange:
        if (self.priority is None) == (self.position is None):
            raise ValueError("either priority or position is needed")
        return self


@router.post("", status_code=202, responses=ACCEPTED, openapi_extra=json_body_of(ImageJob | TrainJob, _EXAMPLE))
async def submit_job(
    request: Request, idempotency_key: Annotated[str | None, Header(max_length=200)] = None
) -> JSONResponse:
    """Queue a job: generate, transform or inpaint images, or train a LoRA."""
    service = service_of(request)
    body = await json_body(request)
    client = client_of(request)
    contract = isinstance(body, dict) and "hive_id" in body
    if isinstance(body, dict) and body.get("operation", body.get("kind")) == "train":
        job = await submit_training(service, body, client=client, key=idempotency_key)
    else:
        image = ImageRequest.parse(contract_fields(body) if contract else body)
        client = f"{RBEE} {client}" if contract else client
        job = await service.submit_image(image, client=client, key=idempotency_key, fingerprint=fingerprint(body))
    if contract:
        return JSONResponse({"job_id": job.id, "sse_url": f"/v1/jobs/{job.id}/stream"}, 200)
    document = accepted_document(job)
    return JSONResponse(document, 202, headers={"Location": document["urls"]["self"]})


@router.get("")
async def list_jobs(
    request: Request,
    state: Annotated[list[State] | None, Query()] = None,
    before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> dict[str, Any]:
    queue = service_of(request).jobs
    jobs = await queue.newest(*(state or ()), before=before, limit=limit)
    documents = [job_document(job, await queue.position(job)) for job in jobs]
    return {"jobs": documents, "next": jobs[-1].number if len(jobs) == limit else None, "paused": await queue.paused()}


@router.get("/{job_id}", responses=JOB, response_model=None)
async def get_job(request: Request, job_id: JobId) -> dict[str, Any]:
    queue = service_of(request).jobs
    job = await queue.present(job_id)
    return job_document(job, await queue.position(job))


@router.patch("/{job_id}", responses=JOB, response_model=None)
async def change_job(request: Request, job_id: JobId, change: JobChange) -> dict[str, Any]:
    queue = service_of(request).jobs
    await queue.present(job_id)
    if change.position is not None:
        job = await queue.move(job_id, change.position)
    else:
        job = await queue.prioritize(job_id, change.priority or 0)
    return job_document(job, await queue.position(job))


@router.delete("/{job_id}")
async def cancel_job(request: Request, job_id: JobId, forget: bool = False) -> dict[str, Any]:
    queue = service_of(request).jobs
    await queue.present(job_id)
    if forget:
        await queue.delete(job_id)
        return {"job_id": job_id, "status": "forgotten"}
    job = await queue.cancel(job_id)
    status = "cancelled" if job.state == "cancelled" or job.client.startswith(f"{RBEE} ") else "cancelling"
    return {"job_id": job.id, "status": status, "state": job.state}


@router.post("/{job_id}/retry", status_code=202, responses=ACCEPTED, response_model=None)
async def retry_job(request: Request, job_id: JobId) -> dict[str, Any]:
    queue = service_of(request).jobs
    await queue.present(job_id)
    return accepted_document(await queue.retry(job_id))


@router.get("/{job_id}/events", response_class=EventSourceResponse, responses=answer_of("text/event-stream"))
async def job_events(
    request: Request, job_id: JobId, last_event_id: Annotated[str | None, Header(max_length=30)] = None
) -> EventSourceResponse:
    service = service_of(request)
    job = await service.jobs.present(job_id)
    return streams.event_stream(service, job, streams.event_number(last_event_id), streams.native)


@router.get("/{job_id}/files/{name}", response_class=FileResponse, responses=answer_of("image/png"))
@router.head("/{job_id}/files/{name}", include_in_schema=False)
async def job_file(request: Request, job_id: JobId, name: FileName) -> Response:
    queue = service_of(request).jobs
    job = await queue.present(job_id)
    file = await queue.file(job.id, name)
    kind = "image/png" if name.endswith(".png") else "application/octet-stream"
    headers = {"Content-Disposition": f'inline; filename="{job.id}-{name}"'}
    if isinstance(file, bytes):
        return Response(file, media_type=kind, headers=headers)
    return FileResponse(file, media_type=kind, headers=headers)


@router.delete("/{job_id}/files/{name}")
async def delete_job_file(request: Request, job_id: JobId, name: FileName, keep: bool = False) -> dict[str, Any]:
    service = service_of(request)
    copy = None if keep else await service.gallery.of_job(await service.jobs.present(job_id), name)
    await service.jobs.delete_image(job_id, name)
    trashed = await service.gallery.delete([copy]) if copy is not None else []
    return {"job_id": job_id, "deleted": name, "trashed": trashed}
