"""For APIs that answer when a job is done: wait for it, cancel it where the caller hangs up."""

from __future__ import annotations

import asyncio

from fastapi import Request

from inweave.errors import CancelledError
from inweave.serve.jobs.failures import error_of
from inweave.serve.jobs.job import Job
from inweave.serve.service import Service


async def wait_or_cancel(request: Request, service: Service, job: Job, *, keep: bool = False) -> Job:
    """The job once it has ended; raises the reason where it failed or was cancelled."""
    ended = await wait(request, service, job, keep=keep)
    if ended.state == "failed" and ended.error is not None:
        raise error_of(ended.error)
    if ended.state == "cancelled":
        raise CancelledError("the job was cancelled")
    return ended


async def wait(request: Request, service: Service, job: Job, *, keep: bool = False) -> Job:
    """The job once it has ended, however it did; a caller that hangs up cancels it, unless it can ask again (``keep``)."""
    try:
        while True:
            current = await service.wait(job.id, 1.0)
            if current.final:
                return current
            if await request.is_disconnected():
                if not keep:
                    await service.abandon(job.id)
                raise CancelledError("the caller hung up")
    except asyncio.CancelledError:
        if not keep:
            await asyncio.shield(service.abandon(job.id))
        raise


async def finished_images(service: Service, job: Job) -> list[bytes]:
    """The pictures of a job that is done, as PNG."""
    return [await asyncio.to_thread(path.read_bytes) for path in service.result_files(job)]
