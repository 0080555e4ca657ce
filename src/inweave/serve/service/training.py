"""Training jobs: plans, submissions, checkpoints."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, Problem, RequestError
from inweave.library import LibraryEntry
from inweave.serve.jobs.job import Job, Submission
from inweave.serve.jobs.training_runs import Checkpoint, TrainingRuns
from inweave.serve.planner.client import PlannerClient
from inweave.serve.service.datasets import Datasets
from inweave.serve.service.jobs import Jobs
from inweave.serve.service.loras import Loras
from inweave.serve.service.models import Models
from inweave.serve.service.training_limits import limit_problems
from inweave.serve.settings import ServeSettings
from inweave.training.config.fields import ACCOUNT, names_where
from inweave.training.config.schema import TrainConfig

#: settings that name files of this machine, or that the worker decides
RESERVED = (
    *names_where(private=True), *ACCOUNT, "allow_download", "dataset", "model", "name", "parts", "start_from",
    "tensorboard", "shard", "variant", "control",
)  # fmt: skip
_REFERENCE = re.compile(r"(?:^|\s)--ci(?:\s|$)", re.IGNORECASE)
_FILE = re.compile(r".*\.(txt|toml|json)\s*", re.DOTALL | re.IGNORECASE)


def checked_settings(value: dict[str, Any]) -> dict[str, Any]:
    """Return settings that a request may have; raise ConfigError with the others."""
    problems = [Problem(name, "decided by the worker, not by a request") for name in value if name in RESERVED]
    problems += limit_problems(value)
    prompts = value.get("sample_prompts", ())
    listed = [prompts] if isinstance(prompts, str) else prompts
    texts = [each for each in listed if isinstance(each, str)] if isinstance(listed, list | tuple) else [".txt"]
    if any(map(_FILE.fullmatch, texts)):
        problems.append(Problem("sample_prompts", "pass a list of prompts, not a file"))
    if any(map(_REFERENCE.search, texts)):
        problems.append(Problem("sample_prompts", "--ci names a file of this machine; leave it out"))
    if value.get("dialect") == "peft":
        advice = "a PEFT adapter is a folder; train another dialect and convert the LoRA afterwards"
        problems.append(Problem("dialect", advice))
    if problems:
        raise ConfigError(problems)
    return value


class Training:
    """Training on a worker's datasets; ``settings`` of calls are those of a `TrainConfig` that a request may set."""

    def __init__(
        self, settings: ServeSettings, models: Models, jobs: Jobs, loras: Loras, datasets: Datasets, runs: TrainingRuns
    ) -> None:
        self.allowed = settings.allow_train
        own = (*settings.train_devices, *settings.devices) if settings.cluster is None else ()
        self._device = next(iter(own), None)
        self._models, self._jobs, self._loras, self._datasets, self._runs = models, jobs, loras, datasets, runs
        self._planner = PlannerClient(settings.plan_seconds, private=settings.private_folders())

    def ensure_allowed(self) -> None:
        """Raise RequestError if this worker does not train."""
        if not self.allowed:
            raise RequestError("this worker does not train")

    async def submit(
        self, *, model: str | None, dataset: str, name: str, settings: dict[str, Any], start_from: str | None,
        priority: int, client: str, key: str | None, fingerprint: str,
    ) -> Job:  # fmt: skip
        """Check a run and queue it."""
        model = self._models.name(model)
        await self._datasets.ensure_captions(dataset, settings.get("caption"))
        entries = {} if start_from is None else {"start_from": await self._loras.find(start_from)}
        loras = {label: entry.id for label, entry in entries.items()}
        files = await asyncio.to_thread(self._loras.identities, entries)
        TrainConfig(**checked_settings(settings), dataset="-", name=name)  # raises everything that is wrong
        stored = {
            "config": {**settings, "name": name}, "dataset": dataset, "loras": loras, "lora_files": files,
            "warnings": [],
        }  # fmt: skip
        return await self._queue(Submission("train", model, stored, {}, priority, client, key, fingerprint))

    async def _queue(self, submission: Submission) -> Job:
        job, _ = await self._jobs.submit(submission)
        self._planner.release()  # the run needs the memory
        return job

    async def check(
        self, *, model: str | None, dataset: str, settings: dict[str, Any], start_from: str | None
    ) -> dict[str, Any]:
        """Return the report of `inweave train --check` on such a run."""
        model = self._models.name(model)
        folder = await self._datasets.folder(dataset)
        TrainConfig(**checked_settings(settings), dataset="-")
        try:
            await self._datasets.ensure_captions(dataset, settings.get("caption"))
        except ConfigError as error:
            return {"model": model, "ok": False, "problems": [*map(str, error.problems)], "settings": {}}
        plan = self._plan(folder, model, settings) | {"output": str(self._runs.nowhere), "device": self._device}
        if start_from is not None:
            plan["start_from"] = str((await self._loras.find(start_from)).file)
        report = await self._planner.call("check", plan)
        chosen = {name: value for name, value in report.pop("settings", {}).items() if name not in RESERVED}
        return {"model": model, **report, "settings": chosen}

    async def crops(self, *, model: str | None, dataset: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the bucket and the crop of every image of a dataset."""
        model = self._models.name(model)
        checked_settings(settings)
        folder = await self._datasets.folder(dataset)
        if not await self._datasets.has_images(dataset):
            return {"model": model, "pictures": [], "buckets": {}}
        return {"model": model, **await self._planner.call("crops", self._plan(folder, model, settings))}

    def _plan(self, folder: Path, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        return {"dataset": str(folder), "model": self._models.location(model), "settings": settings}

    async def run(self, job: str) -> Job:
        """Return a training job; raise RequestError if it is another kind of job."""
        current = await self._jobs.present(job)
        if current.kind != "train":
            raise RequestError(f"job {current.id} makes images; only train jobs have checkpoints")
        return current

    async def extend(self, job: str, steps: int) -> Job:
        """Queue a job that trains the run of another one up to ``steps`` steps."""
        return await self._queue(await asyncio.to_thread(self._runs.extend, await self.run(job), steps))

    async def checkpoints(self, job: str) -> list[Checkpoint]:
        """Return the adapters that a job's run has written."""
        return await asyncio.to_thread(self._runs.checkpoints, await self.run(job))

    async def publish(self, job: str, step: int) -> LibraryEntry:
        """Put the adapter of a checkpoint into the library."""
        checkpoint = await asyncio.to_thread(self._runs.checkpoint, await self.run(job), step)
        return await asyncio.to_thread(self._loras.publish, checkpoint.path, checkpoint.path.stem)

    async def close(self) -> None:
        """End the process that plans."""
        await self._planner.close()
