"""The queue as a whole.

GET    /v1/queue     {paused, running, waiting, length, limit}: what runs, and what waits in the order it will run
POST   /v1/queue     {paused}: waiting jobs wait on while it is paused, also over restarts; running ones go on
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from inweave.serve.api.json_body import JsonRoute
from inweave.serve.api.native.jobs import job_document, service_of

router = APIRouter(prefix="/v1/queue", route_class=JsonRoute)


class QueueChange(BaseModel):
    """Pause or resume the queue."""

    paused: bool


@router.get("")
async def get_queue(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
    """``limit``: of the waiting jobs that are listed; ``length`` counts all of them."""
    store = service_of(request).store
    running = await asyncio.to_thread(store.jobs, states=("running",), limit=1000)
    waiting = await asyncio.to_thread(store.waiting, limit)
    return {
        "paused": store.paused, "running": [job_document(job) for job in reversed(running)],
        "waiting": [job_document(job, place) for place, job in enumerate(waiting)],
        "length": store.count("queued"), "limit": store.queue_limit,
    }  # fmt: skip


@router.post("")
async def change_queue(request: Request, change: QueueChange) -> dict[str, Any]:
    service = service_of(request)
    await asyncio.to_thread(service.store.pause, change.paused)
    service.signals.work()
    return {"paused": change.paused}
