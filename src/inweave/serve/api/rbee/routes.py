"""rbee's worker contract.

GET /info                     WorkerInfo
GET /v1/jobs/{id}/stream      the events of a job in rbee's form
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from sse_starlette import EventSourceResponse, ServerSentEvent

from inweave.serve.api.context import JobId, service_of
from inweave.serve.api.event_streams import event_number, event_stream
from inweave.serve.api.openapi import answer_of
from inweave.serve.api.rbee.events import device_label, rbee_event
from inweave.serve.jobs.job import Job, StoredEvent
from inweave.version import __version__

router = APIRouter()


@router.get("/info")
async def info(request: Request) -> dict[str, Any]:
    """Return the WorkerInfo of rbee's contracts."""
    service = service_of(request)
    states = {"loading": "starting", "failed": "stopped"}
    devices = service.devices
    first = devices[0].status if devices else "ready"  # a cluster may have no runner while there is no work
    status = states.get(first, first)
    identity: dict[str, Any] = request.app.state.identity
    return {
        "id": identity.get("worker_id") or f"worker-inweave-{identity['port']}", "model_id": service.models.name(None),
        "device": device_label(devices[0].device if devices else None), "port": identity["port"],
        "status": "busy" if any(each.busy for each in devices) else status, "implementation": "inweave",
        "version": __version__,
    }  # fmt: skip


@router.get("/v1/jobs/{job_id}/stream", response_class=EventSourceResponse, responses=answer_of("text/event-stream"))
async def job_stream(
    request: Request, job_id: JobId, last_event_id: Annotated[str | None, Header(max_length=30)] = None
) -> EventSourceResponse:
    service = service_of(request)
    job = await service.jobs.present(job_id)

    def translate(job: Job, event: StoredEvent) -> Iterable[ServerSentEvent]:
        return rbee_event(event, lambda name: service.jobs.read(job.id, name))

    return event_stream(service, job, event_number(last_event_id), translate)
