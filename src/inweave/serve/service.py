"""What the worker does, apart from HTTP: every API compiles to these calls.

submission    parse -> look up model and LoRAs -> prove that each LoRA fits -> check pictures -> queue
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, FormatError, InweaveError, MissingError, Problem, TargetError
from inweave.exchange.load import open_base
from inweave.files.paths import printable_path
from inweave.generate.config import GenerateConfig, LoraChoice
from inweave.library import Library, LibraryEntry
from inweave.models import embedded
from inweave.models.samplers import ensure_schedule
from inweave.models.variants import find_variant
from inweave.serve.engine.contract import RunnerSettings
from inweave.serve.engine.dispatcher import Dispatcher, DispatchSettings, Resolved
from inweave.serve.jobs.errors import StorageError
from inweave.serve.jobs.image_request import ImageRequest, decode_base64, png_size
from inweave.serve.jobs.job import Job, Submission
from inweave.serve.jobs.signals import JobSignals
from inweave.serve.jobs.store import JobStore
from inweave.serve.jobs.training_runs import TrainingRuns, add_to_library, free_name
from inweave.serve.planner.client import PlannerClient
from inweave.serve.sandbox.client import SandboxClient
from inweave.serve.sandbox.conversions import ConversionStore
from inweave.serve.sandbox.library_scan import scan_library
from inweave.serve.settings import ServeSettings, model_name
from inweave.serve.storage.datasets import DatasetStore
from inweave.serve.storage.run_retention import expire_runs
from inweave.serve.storage.uploads import PREFIX, UploadStore

log = logging.getLogger("inweave.serve")
SWEEP_SECONDS = 60.0
GRACE = 5.0
MAX_LORAS = 100


class MismatchError(TargetError):
    """A LoRA does not fit the model; ``report`` is the verdict of `inweave check`."""

    def __init__(self, message: str, report: dict[str, Any]) -> None:
        super().__init__(message)
        self.report = report


class Service:
    """The parts of a worker, started and stopped together."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.models = settings.model_table()
        self.store = JobStore(
            settings.data, queue_limit=settings.queue_limit, keep_seconds=settings.keep_hours * 3600,
            keep_bytes=int(settings.keep_gb * 1024**3),
        )  # fmt: skip
        self.uploads = UploadStore(
            settings.data, keep_seconds=settings.keep_hours * 3600, max_count=settings.upload_count,
            max_bytes=int(settings.upload_gb * 1024**3),
        )  # fmt: skip
        self.datasets = DatasetStore(settings.data / "datasets", int(settings.dataset_gb * 1024**3))
        self.runs = TrainingRuns(settings.data / "training")
        self.planner = PlannerClient()
        self.loras = settings.data / "loras"  # uploaded and trained here
        self.loras.mkdir(parents=True, exist_ok=True)
        folders = [*settings.lora_folders, self.loras, embedded.folder() / "loras"]
        self.library = Library(settings.data / "library.sqlite3", folders)
        self.signals = JobSignals()
        self.sandbox = SandboxClient(folders=self.library.folders)
        self.conversions = ConversionStore(settings.data / "converted", self.sandbox)
        self.started = time.time()
        self.scan_report: dict[str, Any] | None = None
        memory = int(settings.memory_gb * 1024**3) if settings.memory_gb is not None else None
        self.dispatchers = [
            Dispatcher(
                self.store, self.signals,
                DispatchSettings(
                    RunnerSettings(device, settings.dtype, memory, folders=tuple(map(str, self.library.folders))),
                    settings.model, settings.job_seconds, settings.train_hours * 3600,
                ),
                self._resolve, self._deliver,
            )
            for device in (settings.devices or (None,))
        ]  # fmt: skip
        self._verdicts: dict[tuple[str, int, float, str], dict[str, Any]] = {}
        self._bases: dict[str, str | None] = {}
        self._tasks: list[asyncio.Task[None]] = []

    # life

    @classmethod
    def open(cls, settings: ServeSettings) -> Service:
        """The parts of a worker, with what its last process left in order; `ConfigError` where its folder is unusable."""
        try:
            service = cls(settings)
            service.store.recover()
        except (OSError, sqlite3.Error) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(
                f"{printable_path(settings.data)}: cannot be used as the data folder: {reason}; choose one with --data"
            ) from None
        return service

    async def start(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.settings.data / "incoming", ignore_errors=True)
        await asyncio.to_thread(self.conversions.clear)
        self._tasks = [asyncio.create_task(each.run()) for each in self.dispatchers]
        self._tasks += [asyncio.create_task(self._sweep()), asyncio.create_task(self._index())]

    async def stop(self) -> None:
        """Finish what runs within the grace period, put the rest back, close everything."""
        await asyncio.gather(*(each.drain(self.settings.drain_seconds) for each in self.dispatchers))
        await asyncio.wait(self._tasks[: len(self.dispatchers)], timeout=GRACE)  # they end by themselves
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.sandbox.close()
        await self.planner.close()
        self.library.close()
        self.uploads.close()
        self.store.close()

    async def _sweep(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.store.expire)
                await asyncio.to_thread(self.conversions.expire)
                await asyncio.to_thread(self.uploads.expire)
                await asyncio.to_thread(expire_runs, self.store, self.settings.data / "training", self.store.keep_bytes)
            except Exception:
                log.exception("expired jobs could not be removed")
            await asyncio.sleep(SWEEP_SECONDS)

    async def _index(self) -> None:
        while True:
            await self.scan(examine=True)
            await asyncio.sleep(SWEEP_SECONDS)

    async def scan(self, *, examine: bool = False) -> None:
        """Bring the index of the library up to date."""
        await scan_library(self.library, self.settings.data / "library.sqlite3", examine=examine)

    @property
    def readiness(self) -> tuple[bool, str]:
        """(whether a job would run now, why not)."""
        states = [each.status for each in self.dispatchers]
        if "ready" in states:
            return True, ""
        return False, self.dispatchers[0].reason

    # models and LoRAs

    def model(self, name: str | None) -> str:
        """The name of a model that may be used; None is the worker's own."""
        if name is None:
            return model_name(self.settings.model)
        if name in self.models:
            return name
        if (variant := find_variant(name)) is not None:
            for served, where in self.models.items():
                if where == variant.repo:  # the same model by another of its names
                    return served
        raise MissingError(f"model {name[:200]}: not served here; there are {', '.join(self.models)}")

    def base_of(self, model: str) -> str:
        """What `check` compares adapters with: the weights of a model."""
        where = self.models[model]
        return str(embedded.folder()) if where == embedded.NAME else where

    async def verdict(self, entry: LibraryEntry, model: str) -> dict[str, Any]:
        """Whether a LoRA fits a model, proved in another process and remembered while the file stays the same."""
        key = (entry.id, entry.size, entry.modified, model)
        if key not in self._verdicts:
            if len(self._verdicts) > 10_000:
                self._verdicts.clear()
            self._verdicts[key] = await self.sandbox.lora(str(entry.file), self.base_of(model), f"LoRA {entry.name}")
        return self._verdicts[key]

    async def fits_by_header(self, entry: LibraryEntry, model: str) -> bool:
        """Whether a LoRA was detected to be made for a model's base: cheap, for lists."""
        base = await self.base_name(model)
        return entry.facts.base is not None and entry.facts.base == base

    async def base_name(self, model: str) -> str | None:
        """The base that a model's tensors are those of; None where it is not known."""
        if model not in self._bases:
            self._bases[model] = await asyncio.to_thread(_base_name, self.base_of(model))
        return self._bases[model]

    async def model_facts(self, model: str) -> dict[str, Any]:
        """The base of a model, and what requests that leave it open get, as far as the base decides that."""
        base = await self.base_name(model)
        variant = embedded.VARIANT if base == embedded.NAME else find_variant(base) if base is not None else None
        defaults = None
        if variant is not None:
            defaults = {"size": variant.size, "steps": variant.steps, "guidance": variant.guidance}
        return {"base": base, "defaults": defaults}

    async def add_lora(self, name: str, content: AsyncIterator[bytes]) -> LibraryEntry:
        """Receive a file, have another process read it, and add it under a name that is free."""
        incoming = self.settings.data / "incoming"
        incoming.mkdir(exist_ok=True)
        received = incoming / f"{secrets.token_hex(16)}.safetensors"
        try:
            with received.open("xb") as file:
                async for chunk in content:
                    await asyncio.to_thread(file.write, chunk)
            await self.sandbox.adapter(str(received), f"LoRA {name}")
            target = free_name(self.loras, name)
            received.replace(target)
        except OSError as error:
            raise StorageError(f"the file could not be stored: {error.strerror}") from None
        finally:
            received.unlink(missing_ok=True)
        await asyncio.to_thread(self.library.scan)
        return await asyncio.to_thread(self.library.find, str(target.resolve()))

    async def find_loras(self, choices: Iterable[LoraChoice]) -> dict[str, LibraryEntry]:
        """Each reference and its entry; everything that is unknown is one error."""
        entries: dict[str, LibraryEntry] = {}
        problems: list[InweaveError] = []
        for choice in choices:
            try:
                entries[choice.label] = await asyncio.to_thread(self.library.find, choice.label)
            except InweaveError as error:
                problems.append(error)
        if len(problems) == 1:
            raise problems[0]
        if problems:
            raise MissingError("; ".join(str(problem) for problem in problems))
        return entries

    async def _check_fit(self, entries: Iterable[LibraryEntry], model: str, on_mismatch: str) -> list[str]:
        """Warnings for what does not fit, or `MismatchError` with the report."""
        warnings: list[str] = []
        for entry in entries:
            if entry.facts.error:
                raise FormatError(f"LoRA {entry.name}: {entry.facts.error}")
            verdict = await self.verdict(entry, model)
            if verdict["ok"]:
                continue
            message = f"LoRA {entry.name} does not fit {model}: " + (
                verdict["error"] or f"{verdict['placed']} of {verdict['tensors']} tensors have a place"
            )
            if on_mismatch == "error" or not verdict["placed"]:
                raise MismatchError(message, verdict)
            warnings.append(message)
        return warnings

    # jobs

    async def submit_image(
        self, request: ImageRequest, *, client: str = "", key: str | None = None, fingerprint: str = ""
    ) -> tuple[Job, bool]:
        """Check a request whole and queue it; (the job, whether it is new)."""
        if key is not None and (known := await asyncio.to_thread(self.store.submitted, key, fingerprint)) is not None:
            return known, False  # whatever became of its LoRAs meanwhile
        model = self.model(request.model)
        config = request.settings
        if config.count > self.settings.max_images:
            raise ConfigError(
                Problem("count", f"at most {self.settings.max_images} images in one job, got {config.count}")
            )
        if config.sampler is not None:
            ensure_schedule(config.sampler, config.schedule)
        if (config.width or 0) * (config.height or 0) > self.settings.image_pixels:
            raise ConfigError(f"width x height: at most {self.settings.image_pixels:,} pixels")
        choices = (*config.loras, *config.tagged_loras())
        if len(choices) > MAX_LORAS:
            raise ConfigError(Problem("loras", f"at most {MAX_LORAS} in one job, got {len(choices)}"))
        loras = await self.find_loras(choices)
        warnings = await self._check_fit(loras.values(), model, request.on_mismatch)
        inputs = {
            f"{name}.png": await self.picture(text, label)
            for name, label, text in (("init", "image", request.image), ("mask", "mask_image", request.mask_image))
            if text is not None
        }
        if (
            "mask.png" in inputs
            and (sizes := [png_size(inputs[name]) for name in ("init.png", "mask.png")])[0] != sizes[1]
        ):
            (width, height), (mask_width, mask_height) = sizes
            reason = f"{mask_width}x{mask_height}; it must have the size of the image, {width}x{height}"
            raise ConfigError(Problem("mask_image", reason))
        body = {
            "config": _stored(config), "loras": {label: entry.id for label, entry in loras.items()},
            "preview_every": request.preview_every, "preview_first": request.preview_first, "on_mismatch": request.on_mismatch, "warnings": warnings,
        }  # fmt: skip
        submission = Submission(request.operation, model, body, inputs, request.priority, client, key, fingerprint)
        return await self.submit(submission)

    async def submit(self, submission: Submission) -> tuple[Job, bool]:
        job, new = await asyncio.to_thread(self.store.submit, submission)
        if new:
            self.signals.work()
        return job, new

    async def picture(self, text: str, label: str) -> bytes:
        """A picture of a request, in base64 or by the id of an upload, as a clean PNG."""
        if text.startswith(PREFIX):
            return await asyncio.to_thread(self.uploads.read, text)
        content = decode_base64(text, label, self.settings.body_bytes)
        return await self.sandbox.image(content, label, self.settings.image_pixels)

    async def cancel(self, job: str) -> Job:
        """End a waiting job now, a running one after its current step."""
        cancelled = await asyncio.to_thread(self.store.cancel, job)
        self.signals.changed(job)
        return cancelled

    async def abandon(self, job: str) -> None:
        """Cancel a job whose only reader left, unless it has ended."""
        with contextlib.suppress(InweaveError):
            await self.cancel(job)

    async def wait(self, job: str, seconds: float) -> Job:
        """The job once it has ended, or as it is after so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            waiter = asyncio.ensure_future(self.signals.wait_for_change(job, 1.0))
            current = await asyncio.to_thread(self.store.job, job)
            if current.final or time.monotonic() >= deadline:
                waiter.cancel()
                return current
            await waiter

    def _resolve(self, job: Job) -> Resolved:
        """What a job needs when it starts: files may have moved since it was submitted."""
        loras = {label: self._file(label, entry) for label, entry in job.request.get("loras", {}).items()}
        if job.model not in self.models:
            raise MissingError(f"model {job.model}: no longer served here")
        paths = {}
        if job.kind == "train":
            paths = {
                "dataset": str(self.datasets.folder(job.request["dataset"])),
                "output": str(self.runs.folder(job)),
            }
        return Resolved(self.models[job.model], loras, paths)

    def _file(self, label: str, entry: str) -> str:
        try:
            return str(self.library.get(entry).file)
        except MissingError:
            raise MissingError(
                f"LoRA {label}: its file was replaced or removed since the job was submitted; submit it again"
            ) from None

    def _deliver(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        """Put a trained adapter into the library, under a name that is free."""
        if job.kind != "train":
            return result
        source = Path(result["adapter"])
        return {**result, "adapter": self.publish(source, source.stem).as_dict(details=False)}

    def publish(self, adapter: Path, stem: str) -> LibraryEntry:
        """Put an adapter that was trained here into the library, under a name that is free."""
        target = add_to_library(adapter, self.loras, stem)
        self.library.scan()
        return self.library.find(str(target.resolve()))

    def result_files(self, job: Job) -> list[Path]:
        """The pictures of a job that is done."""
        images = (job.result or {}).get("images", ())
        return [self.store.files.result(job.id, image["file"]) for image in images]


def _base_name(where: str) -> str | None:
    try:
        return open_base(where).base
    except InweaveError:
        return None


def _stored(config: GenerateConfig) -> dict[str, Any]:
    """The settings as they are stored: LoRAs by the reference the client used, never by a path of this machine."""
    fields = config.model_dump(exclude_none=True, exclude_defaults=True)
    fields["prompt"] = config.prompt
    fields["loras"] = [
        {"name": choice.label, "strength": choice.strength, "te": choice.te, "unet": choice.unet, "alpha": choice.alpha}
        for choice in config.loras
    ]
    return fields
