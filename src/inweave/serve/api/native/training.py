"""Training over HTTP: settings, plans of runs, extensions and checkpoints.

GET   /v1/train/options?model=              the settings of a run, the defaults of this model, and presets by purpose
POST  /v1/train/check                       {dataset, model, settings}: problems, memory and time of a run
POST  /v1/jobs/{id}/extend                  {steps}: a new job that trains the same run further
GET   /v1/jobs/{id}/checkpoints             the steps whose adapters can be used
POST  /v1/jobs/{id}/checkpoints/{step}      put the adapter of a step into the library, unless it is there

A train job is started with POST /v1/jobs, paused with DELETE (it saves a checkpoint first) and resumed with
POST /v1/jobs/{id}/retry.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field

from inweave.serve.api.context import JobId, accepted_document, service_of
from inweave.serve.api.json_body import JsonRoute
from inweave.serve.api.native.documents import ACCEPTED
from inweave.serve.api.native.training_options import own_settings, purposes, setting_table
from inweave.serve.api.native.training_requests import TrainCheck
from inweave.serve.api.openapi import MAY_BE_BUSY

router = APIRouter(prefix="/v1", route_class=JsonRoute)
Steps = Annotated[int, Field(ge=1, lt=2**31)]


class Extension(BaseModel):
    """The number of steps of the whole run."""

    steps: Steps


@router.get("/train/options")
async def options(request: Request, model: Annotated[str | None, Query(max_length=1000)] = None) -> dict[str, Any]:
    service = service_of(request)
    service.training.ensure_allowed()
    name = service.models.name(model)
    base = await service.models.base(name)
    own = own_settings(base)
    return {"model": name, "base": base, "own": own, "presets": purposes(own), "settings": setting_table(own)}


@router.post("/train/check", responses=MAY_BE_BUSY)
async def check(request: Request, question: TrainCheck) -> dict[str, Any]:
    training = service_of(request).training
    training.ensure_allowed()
    return await training.check(**question.model_dump())


@router.post("/jobs/{job_id}/extend", status_code=202, responses=ACCEPTED, response_model=None)
async def extend(request: Request, job_id: JobId, extension: Extension) -> dict[str, Any]:
    return accepted_document(await service_of(request).training.extend(job_id, extension.steps))


@router.get("/jobs/{job_id}/checkpoints")
async def checkpoints(request: Request, job_id: JobId) -> dict[str, Any]:
    listed = await service_of(request).training.checkpoints(job_id)
    return {"checkpoints": [{"step": each.step, "bytes": each.bytes} for each in listed]}


@router.post("/jobs/{job_id}/checkpoints/{step}", status_code=201)
async def use_checkpoint(request: Request, job_id: JobId, step: Annotated[int, Path(ge=1, lt=2**31)]) -> dict[str, Any]:
    service = service_of(request)
    (document,) = await service.loras.documents(await service.training.publish(job_id, step))
    return document
