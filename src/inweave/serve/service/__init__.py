"""The worker without HTTP: every API compiles to the calls of `Service`.

jobs        queue, wait for, reorder, cancel
loras       look up, add, check against models, convert; lora_samples: their sample images
models      names and locations
images      images of requests, uploads, settings stored in images
prompts     wildcards, styles, upscalers
gallery     images that stay: search, star, albums, delete, import
datasets    images and captions to train on
training    plan, submit, extend; checkpoints

An image job: parse -> look up model and LoRAs -> prove that each LoRA fits -> check images -> queue. APIs use these
subjects and plain data types, never the parts behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, ConflictError, InweaveError
from inweave.files.paths import printable_path
from inweave.library import Library
from inweave.models import embedded
from inweave.serve.cluster.fleet import Fleet, Node
from inweave.serve.cluster.storage import witness_file
from inweave.serve.engine.assignment import Assignments, DeviceSlot
from inweave.serve.engine.contract import LEASE, DeviceMemory, RunnerEndpoint, RunnerSettings
from inweave.serve.engine.dispatcher import Dispatcher, DispatchSettings, Resolved
from inweave.serve.jobs.errors import DatabaseLost
from inweave.serve.jobs.figures import Figures
from inweave.serve.jobs.files import JobFiles
from inweave.serve.jobs.image_request import ImageRequest
from inweave.serve.jobs.job import Job
from inweave.serve.jobs.private_paths import PATHS
from inweave.serve.jobs.signals import LIBRARY, JobSignals, wait_seconds
from inweave.serve.jobs.store import JobStore
from inweave.serve.jobs.training_runs import TrainingRuns
from inweave.serve.jobs.usage import Usage
from inweave.serve.planner.captions import CaptionClient
from inweave.serve.sandbox.client import SandboxClient
from inweave.serve.scheduler.device import device_names, threads_each, training_role
from inweave.serve.service.datasets import Datasets
from inweave.serve.service.gallery import Gallery
from inweave.serve.service.image_jobs import ImageJobs
from inweave.serve.service.images import Images
from inweave.serve.service.jobs import Jobs
from inweave.serve.service.lora_samples import Samples
from inweave.serve.service.loras import Loras
from inweave.serve.service.models import Models
from inweave.serve.service.prompts import Prompts
from inweave.serve.service.stores import open_blobs, open_database, open_gallery
from inweave.serve.service.training import Training
from inweave.serve.settings import ServeSettings
from inweave.serve.storage.datasets import DatasetStore
from inweave.serve.storage.run_retention import expire_runs
from inweave.serve.storage.uploads import UploadStore

log = logging.getLogger("inweave.serve")
SWEEP_SECONDS = 60.0
#: files without a job may be those of a submission that another process is about to store
LOST_SECONDS = 3600.0
GRACE = 5.0
#: in which a process that still trains sees that another one has its run, and ends (`engine.training_job`)
RELEASE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device that runs jobs, and its figures since the worker started."""

    device: str | None
    status: str
    busy: bool
    finished_jobs: int
    restarts: int
    busy_seconds: float
    name: str = ""
    reason: str = ""  # why it is not ready
    models: tuple[str, ...] = ()  # that it holds
    adapters: int = 0  # that it holds
    job: str | None = None
    role: str = "mixed"
    memory: DeviceMemory | None = None
    node: str = ""  # of a cluster
    loras: tuple[str, ...] = ()  # that it holds, by the references of jobs


class Service:
    """The parts of a worker, started and stopped together."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        data, private = settings.data, settings.private_folders()
        PATHS.add(private)
        database, blobs = open_database(settings), open_blobs(settings)
        self.store = JobStore(
            data, queue_limit=settings.queue_limit, keep_seconds=settings.keep_hours * 3600,
            keep_bytes=int(settings.keep_gb * 1024**3), database=database, lease_seconds=settings.lease_seconds,
            files=JobFiles(blobs.part("files")),
        )  # fmt: skip
        witness = None if settings.cluster is None else witness_file(settings)
        shared = settings.shared_folder() if witness is None else witness.parent
        if isinstance(settings.blobs, str):
            self.store.ensure_same_store("--blobs", blobs)
        else:
            self.store.ensure_same_folder("--blobs", settings.images_folder())
        self.store.ensure_same_folder("--shared", shared)
        incoming = data / "incoming" if shared == data else shared / "incoming" / self.store.name
        self._uploads = UploadStore(
            data, keep_seconds=settings.keep_hours * 3600, max_count=settings.upload_count,
            max_bytes=int(settings.upload_gb * 1024**3), files=blobs.part("uploads"), database=database,
        )  # fmt: skip
        self._dataset_store = DatasetStore(shared / "datasets", int(settings.dataset_gb * 1024**3))
        self._runs = TrainingRuns(shared / "training")
        (shared / "loras").mkdir(parents=True, exist_ok=True)
        folders = [*settings.lora_folders, shared / "loras", embedded.folder() / "loras"]
        self.library = Library(data / "library.sqlite3", folders)
        self._signals = signals = JobSignals()
        self.figures = Figures()
        self._sandbox = SandboxClient(folders=self.library.folders, private=private)
        self.models = Models(settings.model_table())
        self.usage = Usage(data, self.store.count_of, self.figures.refused, database=database)
        self.jobs = Jobs(self.store, signals, self.usage)
        self.loras = Loras(data, shared / "loras", incoming, self.library, self.models, self._sandbox)
        self.loras.on_change = lambda: self.store.announce(LIBRARY)
        self.lora_samples = Samples(self.loras, self.jobs, self._sandbox)
        self._library_changed = asyncio.Event()
        self.prompts = Prompts(settings)
        self.images = Images(settings, self._uploads, self._sandbox)
        self.gallery = Gallery(open_gallery(settings, database), self._sandbox, self.store)
        if self.store.shared and settings.gallery:
            self.store.ensure_same_folder("--pictures", settings.gallery_folder())
        captioner = CaptionClient.of(settings, private)
        self.datasets = Datasets(self._dataset_store, self.images, self._sandbox, self.store, captioner)
        self._image_jobs = ImageJobs(settings, self.models, self.loras, self.prompts, self.images, self.jobs)
        self.training = Training(settings, self.models, self.jobs, self.loras, self.datasets, self._runs)
        self.started, self.started_at = time.time(), time.monotonic()
        memory = int(settings.memory_gb * 1024**3) if settings.memory_gb is not None else None
        self._assignments = Assignments(self.store)
        threads = threads_each(settings.devices)

        def dispatcher(runner: RunnerEndpoint | None, slot: DeviceSlot, device: str | None) -> Dispatcher:
            return Dispatcher(
                self.store, signals,
                DispatchSettings(
                    RunnerSettings(
                        device, settings.dtype, memory, folders=tuple(map(str, self.library.folders)), threads=threads,
                        private=private, quantize=settings.quantize, offload=settings.offload,
                        quantized_cache_gb=settings.quantized_cache_gb, batch=settings.batch,
                        graph=settings.graph, lora_cache_gb=settings.lora_cache_gb,
                    ),
                    settings.model, settings.job_seconds, settings.train_hours * 3600,
                ),
                self._resolve, self._deliver, runner, self.figures, slot,
            )  # fmt: skip

        self._dispatchers: list[Dispatcher] = []
        self._fleet: Fleet | None = None
        if witness is not None:
            self._fleet = Fleet(
                settings, str(witness), self.store, signals, self._assignments, self._dispatchers, dispatcher
            )
        else:
            for name, device in zip(device_names(settings.devices), settings.devices or (None,), strict=True):
                slot = self._assignments.add(name, training_role(device, settings.train_devices))
                self._dispatchers.append(dispatcher(None, slot, device))
        self._tasks: list[asyncio.Task[None]] = []

    # life

    @classmethod
    def open(cls, settings: ServeSettings) -> Service:
        """Return a worker with the jobs of its last process recovered; raise ConfigError if its folder is unusable."""
        try:
            service = cls(settings)
            service.store.recover()
        except DatabaseLost as error:
            raise ConfigError(f"--store: the database cannot be used: {error.reason}") from None
        except (OSError, sqlite3.Error) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(
                f"{printable_path(settings.data)}: cannot be used as the data folder: {reason}; choose one with --data"
            ) from None
        return service

    async def start(self) -> None:
        """Start the processes and the periodic work."""
        loop = asyncio.get_running_loop()

        def receive(text: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._receive, text)

        self.store.listen(receive)
        self.store.begin_to_keep_alive()
        self.loras.indexed = False
        await asyncio.to_thread(self.loras.clear)
        runners = (self._fleet,) if self._fleet is not None else self._dispatchers
        self._tasks = [asyncio.create_task(each.run()) for each in runners]
        self._tasks += [asyncio.create_task(each) for each in (self._sweep(), self._index(), self._scan_gallery())]

    async def stop(self) -> None:
        """Finish running jobs within the grace period, put the rest back, close everything."""
        if self._fleet is not None:
            self._tasks[0].cancel()  # it would place others
            await self._fleet.stop(self.settings.drain_seconds)
        else:
            await asyncio.gather(*(each.drain(self.settings.drain_seconds) for each in self._dispatchers))
            await asyncio.wait(self._tasks[: len(self._dispatchers)], timeout=GRACE)  # they end by themselves
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                log.error("a part of the worker had failed: %s", ended)
        await asyncio.gather(self._sandbox.close(), self.training.close(), self.datasets.close())
        for part in (self.library, self._uploads, self.usage, self.gallery, self.store):
            try:
                part.close()
            except (sqlite3.Error, OSError) as error:  # a full disk: what was committed is there at the next start
                log.error("%s could not be closed: %s", type(part).__name__, error)

    def _receive(self, text: str) -> None:
        if text == LIBRARY:
            self._library_changed.set()
        else:
            self._signals.receive(text)

    async def _sweep(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.loras.expire)
                if self.store.shared:
                    self._dataset_store.recount()
                if await asyncio.to_thread(self.store.take_turn, "sweep", 0.9 * SWEEP_SECONDS):
                    await asyncio.to_thread(self._expire)
            except Exception:
                log.exception("expired jobs could not be removed")
            await asyncio.sleep(SWEEP_SECONDS)

    def _expire(self) -> None:
        """Remove what all workers of this queue have and no longer need."""
        self.store.expire()
        self._uploads.expire()
        expire_runs(self.store, self.settings.shared_folder() / "training", self.store.keep_bytes)
        self.store.remove_lost_files(older_than=LOST_SECONDS)
        self.gallery.expire()

    async def _index(self) -> None:
        while True:
            try:
                if not self.loras.indexed:
                    await self.loras.scan()  # headers alone, so that jobs can run
                await self.loras.scan(examine=True)
            except (sqlite3.Error, OSError) as error:
                log.error("the library could not be scanned: %s", error)
            await wait_seconds(self._library_changed, SWEEP_SECONDS)
            self._library_changed.clear()

    async def _scan_gallery(self) -> None:
        """Notice files that other programs put into the folder of the gallery, or remove from it."""
        while self.gallery.enabled:
            try:
                if await asyncio.to_thread(self.store.take_turn, "gallery", 0.9 * SWEEP_SECONDS):
                    await self.gallery.refresh()
            except (InweaveError, sqlite3.Error, OSError) as error:
                log.error("the folder of the gallery could not be read: %s", error)
            await asyncio.sleep(SWEEP_SECONDS)

    @property
    def devices(self) -> list[DeviceState]:
        """The state of every device, in the order of the settings."""
        return [
            DeviceState(
                each.device, each.status, each.current is not None, each.finished_jobs, each.restarts,
                each.busy_seconds, each.slot.view.name,
                each.reason if self._fleet is None else self._fleet.reason_of(each),
                tuple(sorted(each.slot.view.models)), len(each.slot.view.adapters),
                each.current.id if each.current is not None else None,
                each.slot.view.role.name.lower(), each.memory, each.slot.view.node, each.slot.loras,
            )
            for each in self._dispatchers
        ]  # fmt: skip

    @property
    def nodes(self) -> list[Node]:
        """The machines of the cluster; none without one."""
        return [] if self._fleet is None else self._fleet.nodes

    async def reasons(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Return why each of these jobs still waits, by id."""
        return await asyncio.to_thread(self._assignments.reasons, jobs)

    @property
    def readiness(self) -> tuple[bool, str]:
        """(whether a job would run now, the reason if not)."""
        reason = ""
        if not any(each.status == "ready" for each in self._dispatchers):
            reason = self._dispatchers[0].reason if self._fleet is None else self._fleet.reason
        if reason == "" and not self.loras.indexed:
            reason = "the folders of the library are being read"
        return reason == "", reason

    # image jobs

    async def submit_image(
        self, request: ImageRequest, *, client: str = "", key: str | None = None, fingerprint: str = ""
    ) -> Job:
        """Check a request whole and queue it."""
        return await self._image_jobs.submit(request, client=client, key=key, fingerprint=fingerprint)

    # for the dispatchers

    def _resolve(self, job: Job) -> Resolved:
        """Return the files that a job needs when it starts: they may have moved since it was submitted."""
        files = job.request.get("lora_files", {})
        loras = {
            label: self.loras.file(label, entry, files.get(label))
            for label, entry in job.request.get("loras", {}).items()
        }
        model = self.models.location(job.model)
        paths = {}
        if job.kind == "train":
            again = job.attempts > 1 or self._assignments.losses[job.id] > 0
            if self._fleet is not None and (self.store.shared or again):
                # a runner of the last web process ends with its lease
                time.sleep(max(0.0, self.started_at + LEASE - time.monotonic()))
            if not self.store.holds(job.id, job.lease):  # asked last: another process may have it since the claim
                raise ConflictError(f"job {job.id} runs elsewhere")
            output = self._runs.take(job)
            if self.store.shared or (self._fleet is not None and again):
                self._runs.take_over(job, RELEASE_SECONDS)
            paths = {"dataset": str(self._dataset_store.folder(job.request["dataset"])), "output": str(output)}
        upscalers = {name: str(self.prompts.upscaler_file(name)) for name in job.request.get("upscalers", ())}
        models = {name: self.models.location(name) for name in job.request.get("models", ())}
        return Resolved(model, loras, paths, upscalers, models)

    def _deliver(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        """Put images into the gallery, or a trained adapter into the library, under a name that is free."""
        if job.kind != "train":
            return self.gallery.deliver(job, result)
        source = Path(result["adapter"])
        return {**result, "adapter": self.loras.publish(source, source.stem).as_dict(details=False)}
