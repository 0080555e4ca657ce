"""The queue as a whole.

GET    /v1/queue     {paused, running, waiting, length, limit, devices, nodes}: waiting jobs by priority and age, each
                     with the reason why it waits; what each device is, does and holds; the machines of a cluster
POST   /v1/queue     {paused}: waiting jobs are not started while it is paused, also over restarts
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from inweave.serve.api.context import job_document, service_of
from inweave.serve.api.json_body import JsonRoute

router = APIRouter(prefix="/v1/queue", route_class=JsonRoute)


class QueueChange(BaseModel):
    """Pause or resume the queue."""

    paused: bool


@router.get("")
async def get_queue(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
    """Return the queue; ``limit``: of the waiting jobs that are listed, ``length`` counts all of them."""
    service = service_of(request)
    queue = service.jobs
    running = await queue.newest("running", limit=1000)
    waiting = await queue.waiting(limit)
    reasons = await service.reasons(waiting)
    return {
        "paused": await queue.paused(), "running": [job_document(job) for job in reversed(running)],
        "waiting": [{**job_document(job, place), "reason": reasons[job.id]} for place, job in enumerate(waiting)],
        "length": await queue.count("queued"), "limit": queue.limit,
        "devices": [
            {"name": each.name, "device": each.device, "status": each.status, "reason": each.reason, "job": each.job,
             "models": each.models, "adapters": each.adapters, "loras": each.loras, "role": each.role,
             "node": each.node}
            for each in service.devices
        ],
        "nodes": [
            {"name": each.name, "alive": each.alive, "cpus": each.cpus, "gpus": each.gpus} for each in service.nodes
        ],
    }  # fmt: skip


@router.post("")
async def change_queue(request: Request, change: QueueChange) -> dict[str, Any]:
    await service_of(request).jobs.pause(change.paused)
    return {"paused": change.paused}
