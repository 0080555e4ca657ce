"""Training over HTTP: what can be set, what a run would need, and what to do with one that runs or has ended.

GET   /v1/train/options?model=              the settings of a run, what this model prefers, and presets by purpose
POST  /v1/train/check                       {dataset, model, settings}: problems, memory and time, before anything starts
POST  /v1/jobs/{id}/extend                  {steps}: a new job that trains the same run further
GET   /v1/jobs/{id}/checkpoints             the steps whose adapters can be used
POST  /v1/jobs/{id}/checkpoints/{step}      put the adapter of a step into the library; the same again where it is there

A train job is started with POST /v1/jobs, paused with DELETE (it saves a checkpoint first) and resumed with
POST /v1/jobs/{id}/retry.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field

from inweave.errors import RequestError
from inweave.serve.api.json_body import JsonRoute
from inweave.serve.api.native.jobs import JobId, job_urls, present, service_of
from inweave.serve.api.native.loras import document
from inweave.serve.api.native.training_options import own_settings, purposes, setting_table
from inweave.serve.api.native.training_requests import TrainCheck, check_training
from inweave.serve.jobs.job import Job
from inweave.serve.service import Service

router = APIRouter(prefix="/v1", route_class=JsonRoute)
Steps = Annotated[int, Field(ge=1, lt=2**31)]


class Extension(BaseModel):
    """How many steps the run should have in the end."""

    steps: Steps


@router.get("/train/options")
async def options(request: Request, model: Annotated[str | None, Query(max_length=1000)] = None) -> dict[str, Any]:
    service = _training(request)
    name = service.model(model)
    base = await service.base_name(name)
    own = own_settings(base)
    return {"model": name, "base": base, "own": own, "presets": purposes(own), "settings": setting_table(own)}


@router.post("/train/check")
async def check(request: Request, question: TrainCheck) -> dict[str, Any]:
    return await check_training(_training(request), question)


@router.post("/jobs/{job_id}/extend", status_code=202)
async def extend(request: Request, job_id: JobId, extension: Extension) -> dict[str, Any]:
    service = service_of(request)
    job = await _train_job(service, job_id)
    submission = await asyncio.to_thread(service.runs.extend, job, extension.steps)
    longer, _ = await service.submit(submission)
    service.planner.release()
    return {"id": longer.id, "state": longer.state, "urls": job_urls(longer)}


@router.get("/jobs/{job_id}/checkpoints")
async def checkpoints(request: Request, job_id: JobId) -> dict[str, Any]:
    service = service_of(request)
    job = await _train_job(service, job_id)
    listed = await asyncio.to_thread(service.runs.checkpoints, job)
    return {"checkpoints": [{"step": each.step, "bytes": each.bytes} for each in listed]}


@router.post("/jobs/{job_id}/checkpoints/{step}", status_code=201)
async def use_checkpoint(request: Request, job_id: JobId, step: Annotated[int, Path(ge=1, lt=2**31)]) -> dict[str, Any]:
    service = service_of(request)
    job = await _train_job(service, job_id)
    checkpoint = await asyncio.to_thread(service.runs.checkpoint, job, step)
    entry = await asyncio.to_thread(service.publish, checkpoint.path, checkpoint.path.stem)
    return document(service, entry, details=False)


def _training(request: Request) -> Service:
    service = service_of(request)
    if not service.settings.allow_train:
        raise RequestError("this worker does not train")
    return service


async def _train_job(service: Service, job_id: str) -> Job:
    job = await present(service, job_id)
    if job.kind != "train":
        raise RequestError(f"job {job.id} makes pictures; only train jobs have checkpoints")
    return job
