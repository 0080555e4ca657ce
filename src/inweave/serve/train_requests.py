"""Train jobs.

    {"operation": "train", "dataset": "dataset-...", "name": "my-style", "model": ..., "settings": {"steps": 500, "rank": 16}}

``settings`` are those of a training configuration, without the ones that name files or devices of this machine. The
adapter ends up in the library under its name. A run that was interrupted resumes from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, field_validator

from inweave.checked import CheckedModel
from inweave.errors import RequestError
from inweave.serve.jobs import Job, Submission
from inweave.serve.requests import fingerprint
from inweave.serve.service import Service
from inweave.training.config.fields import names_where
from inweave.training.config.schema import TrainConfig

#: settings that name files of this machine, or that the worker decides
RESERVED = (
    *names_where(private=True),
    "dataset",
    "model",
    "name",
    "parts",
    "start_from",
    "tensorboard",
    "shard",
    "variant",
)
_FILE = re.compile(r".*\.(txt|toml|json)\s*", re.DOTALL | re.IGNORECASE)


class TrainRequest(CheckedModel):
    """A train job as a client sends it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    operation: str = "train"
    dataset: Annotated[str, Field(max_length=200)]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
    model: str | None = None
    start_from: str | None = Field(default=None, description="a LoRA of the library to continue training from")
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    settings: dict[str, Any] = Field(default_factory=dict)

    @field_validator("settings")
    @classmethod
    def _only_settings(cls, value: dict[str, Any]) -> dict[str, Any]:
        if reserved := [name for name in value if name in RESERVED]:
            raise ValueError(f"{', '.join(reserved)}: decided by the worker, not by a request")
        prompts = value.get("sample_prompts", ())
        listed = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(listed, list | tuple) or any(
            isinstance(text, str) and _FILE.fullmatch(text) for text in listed
        ):
            raise ValueError("sample_prompts: a list of prompts is needed; files are not read")
        return value


async def submit_training(
    service: Service, body: Mapping[str, Any], *, client: str, key: str | None
) -> tuple[Job, bool]:
    """Check a train request whole and queue it."""
    if not service.settings.allow_train:
        raise RequestError("this worker does not train")
    request = TrainRequest(**{str(name): value for name, value in body.items() if name not in ("hive_id", "worker_id")})
    model = service.model(request.model)
    await asyncio.to_thread(service.datasets.folder, request.dataset)
    TrainConfig(**request.settings, dataset="-", name=request.name)  # raises everything that is wrong
    loras: dict[str, str] = {}
    if request.start_from is not None:
        loras["start_from"] = (await asyncio.to_thread(service.library.find, request.start_from)).id
    config = {**request.settings, "name": request.name}
    stored = {"config": config, "dataset": request.dataset, "loras": loras, "warnings": []}
    submission = Submission("train", model, stored, {}, request.priority, client, key, fingerprint(body))
    return await service.submit(submission)
