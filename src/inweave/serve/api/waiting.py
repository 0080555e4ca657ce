"""For APIs that answer when a job is done: wait for it, cancel it if the caller hangs up."""

from __future__ import annotations

import asyncio

from fastapi import Request

from inweave.errors import CancelledError
from inweave.serve.jobs.failures import error_of
from inweave.serve.jobs.job import Job
from inweave.serve.service import Service


async def wait_or_cancel(request: Request, service: Service, job: Job, *, keep: bool = False) -> Job:
    """Return the job once it is done or cancelled; raise its error if it failed.

    A caller that hangs up cancels it, unless it can ask again (``keep``).
    """
    try:
        while not (current := await service.jobs.wait(job.id, 1.0)).final:
            if await request.is_disconnected():
                if not keep:
                    await service.jobs.abandon(job.id)
                raise CancelledError("the caller hung up")
    except asyncio.CancelledError:
        if not keep:
            await asyncio.shield(service.jobs.abandon(job.id))
        raise
    if current.state == "failed" and current.error is not None:
        raise error_of(current.error)
    return current
