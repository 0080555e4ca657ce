"""Train jobs.

    {"operation": "train", "dataset": "dataset-...", "name": "my-style", "settings": {"steps": 500, "rank": 16}}

``settings`` are those of a training configuration, without the ones that name files or devices of this machine. The
adapter ends up in the library under its name. A run that was interrupted resumes from its last checkpoint.

A check asks the trainer about a run without training: the same fields, but without a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from inweave.checked import CheckedModel
from inweave.serve.jobs.image_request import fingerprint
from inweave.serve.jobs.job import Job
from inweave.serve.service import Service


class TrainCheck(CheckedModel):
    """The fields of a train job that decide what it needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: Annotated[str, Field(max_length=200)]
    model: str | None = None
    start_from: str | None = Field(default=None, description="a LoRA of the library to continue training from")
    settings: dict[str, Any] = Field(default_factory=dict)


class TrainJob(TrainCheck):
    """A train job."""

    operation: str = "train"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0


async def submit_training(service: Service, body: Mapping[str, Any], *, client: str, key: str | None) -> Job:
    """Parse a train request and queue it."""
    service.training.ensure_allowed()
    fields = {str(name): value for name, value in body.items() if name not in ("hive_id", "worker_id", "kind")}
    run = TrainJob(**fields).model_dump(exclude={"operation"})
    return await service.training.submit(**run, client=client, key=key, fingerprint=fingerprint(body))
