"""Train jobs.

    {"operation": "train", "dataset": "dataset-...", "name": "my-style", "model": ..., "settings": {"steps": 500, "rank": 16}}

``settings`` are those of a training configuration, without the ones that name files or devices of this machine. The
adapter ends up in the library under its name. A run that was interrupted resumes from its last checkpoint.

A check asks the same of the trainer without training: the same fields, but no name is needed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from inweave.checked import CheckedModel
from inweave.errors import ConfigError, Problem, RequestError
from inweave.serve.jobs.image_request import fingerprint
from inweave.serve.jobs.job import Job, Submission
from inweave.serve.service import Service
from inweave.training.config.fields import ACCOUNT, names_where
from inweave.training.config.schema import TrainConfig

#: settings that name files of this machine, or that the worker decides
RESERVED = (
    *names_where(private=True),
    *ACCOUNT,
    "allow_download",
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


def checked_settings(value: dict[str, Any]) -> dict[str, Any]:
    """Settings that a request may have; `ConfigError` with the others."""
    problems = [Problem(name, "decided by the worker, not by a request") for name in value if name in RESERVED]
    prompts = value.get("sample_prompts", ())
    listed = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(listed, list | tuple) or any(isinstance(each, str) and _FILE.fullmatch(each) for each in listed):
        problems.append(Problem("sample_prompts", "a list of prompts is needed; files are not read"))
    if value.get("dialect") == "peft":
        problems.append(
            Problem("dialect", "a PEFT adapter is a folder; train another dialect and convert the LoRA afterwards")
        )
    if problems:
        raise ConfigError(problems)
    return value


class TrainCheck(CheckedModel):
    """What a check needs to know of a run; the fields of a train job that decide what it needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: Annotated[str, Field(max_length=200)]
    model: str | None = None
    start_from: str | None = Field(default=None, description="a LoRA of the library to continue training from")
    settings: dict[str, Any] = Field(default_factory=dict)


class TrainRequest(TrainCheck):
    """A train job as a client sends it."""

    operation: str = "train"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0


async def submit_training(
    service: Service, body: Mapping[str, Any], *, client: str, key: str | None
) -> tuple[Job, bool]:
    """Check a train request whole and queue it."""
    if not service.settings.allow_train:
        raise RequestError("this worker does not train")
    request = TrainRequest(
        **{str(name): value for name, value in body.items() if name not in ("hive_id", "worker_id", "kind")}
    )
    model = service.model(request.model)
    await asyncio.to_thread(ensure_captions, service, request)
    loras: dict[str, str] = {}
    if request.start_from is not None:
        loras["start_from"] = (await asyncio.to_thread(service.library.find, request.start_from)).id
    TrainConfig(**checked_settings(request.settings), dataset="-", name=request.name)  # raises everything that is wrong
    config = {**request.settings, "name": request.name}
    stored = {"config": config, "dataset": request.dataset, "loras": loras, "warnings": []}
    submission = Submission("train", model, stored, {}, request.priority, client, key, fingerprint(body))
    submitted = await service.submit(submission)
    service.planner.release()  # the run needs the memory
    return submitted


async def check_training(service: Service, question: TrainCheck) -> dict[str, Any]:
    """What `inweave train --check` says of such a run, from a process of its own."""
    model = service.model(question.model)
    folder = await asyncio.to_thread(service.datasets.folder, question.dataset)
    TrainConfig(**checked_settings(question.settings), dataset="-")
    plan = {
        "dataset": str(folder), "model": service.models[model], "settings": question.settings,
        "output": str(service.runs.nowhere), "device": service.settings.devices[0] if service.settings.devices else None,
    }  # fmt: skip
    try:
        await asyncio.to_thread(ensure_captions, service, question)
    except ConfigError as error:
        return {"model": model, "ok": False, "problems": [*map(str, error.problems)], "settings": {}}
    if question.start_from is not None:
        entry = await asyncio.to_thread(service.library.find, question.start_from)
        plan["start_from"] = str(entry.file)
    report = await service.planner.call("check", plan)
    settings = {name: value for name, value in report.pop("settings", {}).items() if name not in RESERVED}
    return {"model": model, **report, "settings": settings}


def ensure_captions(service: Service, request: TrainCheck) -> None:
    """Refuse a dataset that no run could train on, before anything waits for it."""
    folder = service.datasets.folder(request.dataset)
    pictures = sorted(folder.glob("*.png"))
    if not pictures:
        raise ConfigError(f"dataset {request.dataset}: it has no pictures; put some into it first")
    if not request.settings.get("caption") and not any(path.with_suffix(".txt").is_file() for path in pictures):
        raise ConfigError(
            f"dataset {request.dataset}: none of its {len(pictures)} pictures has a caption; write some, or set `caption`, one "
            "for all pictures"
        )
