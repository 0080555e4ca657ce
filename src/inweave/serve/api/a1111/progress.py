"""The part of the queue that A1111's clients see: progress, previews, tasks, interruption.

A task is a job under the name that a client gave it with `force_task_id`, or under its own id.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from inweave.errors import ConfigError, ConflictError, MissingError, Problem
from inweave.serve.api.a1111.requests import TaskProgress
from inweave.serve.api.context import caller_of, client_of, service_of
from inweave.serve.api.json_body import json_body
from inweave.serve.api.openapi import json_body_of
from inweave.serve.jobs.job import Job
from inweave.serve.service import Service

router = APIRouter()
MAX_TASKS = 10_000


@dataclass(frozen=True, slots=True)
class Moment:
    """The progress of a running job."""

    step: int = 0
    steps: int = 0
    eta: float = 0.0
    preview: str | None = None
    preview_number: int = -1

    @property
    def share(self) -> float:
        return self.step / self.steps if self.steps else 0.0


async def _moment(service: Service, job: Job) -> Moment:
    at = await service.jobs.last_event(job.id, "progress", "preview")
    if at is None:
        return Moment()
    seen = at if at.type == "preview" else await service.jobs.last_event(job.id, "preview")
    return Moment(
        at.data["step"], at.data["total"], at.data["eta"], seen.data["image"] if seen else None,
        seen.number if seen else -1,
    )  # fmt: skip


def sdapi_client(request: Request) -> str:
    """Return the name under which a caller's jobs are stored."""
    return f"sdapi {client_of(request)}"


def remember_task(request: Request, task: str, job: Job) -> None:
    """Store the name that a client gave a job; the oldest names are forgotten first."""
    tasks: dict[str, str] = request.app.state.tasks
    tasks.pop(task, None)
    tasks[task[:200]] = job.id
    while len(tasks) > MAX_TASKS:
        tasks.pop(next(iter(tasks)))


@router.post("/internal/progress", openapi_extra=json_body_of(TaskProgress, {"id_task": "task(1)"}))
async def task_progress(request: Request) -> dict[str, Any]:
    """Return the progress of one task: {id_task, id_live_preview, live_preview}."""
    service = service_of(request)
    body = await json_body(request)
    if not isinstance(body, Mapping) or not isinstance(body.get("id_task"), str):
        raise ConfigError(Problem("id_task", "expected the name of a task"))
    answer: dict[str, Any] = {
        "active": False, "queued": False, "completed": False, "progress": None, "eta": None, "live_preview": None,
        "id_live_preview": -1, "textinfo": "Waiting...",
    }  # fmt: skip
    name = body["id_task"][:200]
    try:
        job = await service.jobs.get(request.app.state.tasks.get(name, name))
    except MissingError:
        return answer
    answer |= {"active": job.state == "running", "queued": job.state == "queued", "completed": job.final}
    if job.state == "queued":
        position, waiting = await service.jobs.position(job), await service.jobs.count("queued")
        answer["textinfo"] = f"In queue: {(position or 0) + 1}/{waiting}"
    if job.state == "running":
        at = await _moment(service, job)
        answer |= {"progress": at.share, "eta": at.eta, "textinfo": None, "id_live_preview": at.preview_number}
        show = body.get("live_preview", True) is not False
        if show and at.preview is not None and body.get("id_live_preview") != at.preview_number:
            answer["live_preview"] = f"data:image/png;base64,{at.preview}"
    return answer


@router.get("/internal/pending-tasks")
async def pending_tasks(request: Request) -> dict[str, Any]:
    """Return the waiting tasks, in the order they will run."""
    waiting = await service_of(request).jobs.waiting_ids()
    names = {job: task for task, job in request.app.state.tasks.items()}
    return {"size": len(waiting), "tasks": [names.get(job, job) for job in waiting]}


@router.get("/sdapi/v1/progress")
async def progress(request: Request, skip_current_image: bool = False) -> dict[str, Any]:
    """Return the progress of the caller's running job, or else of the one that runs."""
    queue = service_of(request).jobs
    jobs = await queue.newest("running", limit=100)
    running = next((job for job in jobs if job.client == sdapi_client(request)), jobs[-1] if jobs else None)
    state: dict[str, Any] = {
        "skipped": False, "interrupted": False, "stopping_generation": False, "job": running.id if running else "",
        "job_count": await queue.count("running", "queued"), "job_timestamp": "0", "job_no": 0, "sampling_step": 0,
        "sampling_steps": 0,
    }  # fmt: skip
    share, eta, image = 0.0, 0.0, None
    if running is not None:
        at = await _moment(service_of(request), running)
        share, eta = at.share, at.eta
        image = None if skip_current_image else at.preview
        state |= {"sampling_step": at.step, "sampling_steps": at.steps}
        state |= {"interrupted": running.cancel, "stopping_generation": running.cancel}
        state["job_timestamp"] = time.strftime("%Y%m%d%H%M%S", time.localtime(running.started or running.created))
    return {"progress": share, "eta_relative": eta, "state": state, "current_image": image, "textinfo": None}


@router.post("/sdapi/v1/interrupt")
async def interrupt(request: Request, id_task: Annotated[str | None, Query(max_length=200)] = None) -> dict[str, Any]:
    """Cancel the caller's running jobs, or else the waiting one of its jobs that would run first.

    Jobs of other clients are never canceled. Callers that are only known by address and program may be several people,
    so they have nothing canceled while more than one of their jobs is unfinished. ``id_task`` names a task instead.
    """
    queue = service_of(request).jobs
    if id_task is not None:
        mine = [await queue.get(request.app.state.tasks.get(id_task, id_task))]
    else:
        client = sdapi_client(request)
        mine = await queue.newest("running", client=client, limit=100)
        waiting = await queue.waiting(2, client)
        if len(mine) + len(waiting) > 1 and not caller_of(request).identified:
            raise ConflictError(
                "several jobs of clients at this address are unfinished and may belong to different people: send "
                "X-Client-Id or a Basic user name with every request, or name one job by ?id_task="
            )
        mine = mine or waiting[:1]
    for job in mine:
        await queue.abandon(job.id)
    return {}


@router.post("/sdapi/v1/skip")
async def skip(request: Request) -> None:
    await interrupt(request)
