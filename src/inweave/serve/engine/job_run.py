"""One job on a runner: sent, followed and watched until it has ended, whatever ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inweave.errors import InweaveError
from inweave.serve.engine.assignment import DeviceSlot
from inweave.serve.engine.contract import (
    Cancel,
    Finished,
    JobEvent,
    Report,
    RunnerEndpoint,
    RunnerLostError,
    RunnerSettings,
    RunRequest,
)
from inweave.serve.engine.record import record
from inweave.serve.engine.wire import WireError
from inweave.serve.jobs.errors import StorageError, StoreLost
from inweave.serve.jobs.failures import failure_of
from inweave.serve.jobs.figures import Figures
from inweave.serve.jobs.job import Failure, Job, State
from inweave.serve.jobs.signals import JobSignals
from inweave.serve.jobs.store import JobStore

log = logging.getLogger("inweave.serve")
#: seconds after a cancellation or a timeout until the runner is stopped
PATIENCE = 30.0
#: the same for training, which saves its checkpoint after a step that may take long
TRAIN_PATIENCE = 600.0
CRASHED = "the process that ran it ended unexpectedly"
LOST = "the machine that ran it ended or could not be reached"
#: how often a job is run again after the loss of a machine
MAX_LOSSES = 20
#: fields of a stored request that a runner gets unchanged
RUN_OPTIONS = ("preview_every", "preview_first", "on_mismatch", "sheet")


@dataclass(frozen=True, slots=True)
class Resolved:
    """The references of a job as paths on this machine; fields as in `RunRequest`."""

    model: str
    loras: dict[str, str]
    paths: dict[str, str]
    upscalers: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)


#: raises an InweaveError if a file is gone since the job was submitted
Resolve = Callable[[Job], Resolved]
#: called with a finished job's result before it is stored; may change it
Deliver = Callable[[Job, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """The settings of a dispatcher's runner, and time limits for jobs."""

    runner: RunnerSettings = field(default_factory=RunnerSettings)
    preload: str | None = None
    job_seconds: float = 3600.0
    train_seconds: float = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class JobServices:
    """What the jobs of a device share; ``stopping``: whether the worker is being shut down."""

    store: JobStore
    signals: JobSignals
    settings: DispatchSettings
    resolve: Resolve
    deliver: Deliver
    runner: RunnerEndpoint
    slot: DeviceSlot
    figures: Figures
    stopping: Callable[[], bool]

    async def stored(
        self, call: Callable[..., Any], *values: Any,
        repeat: tuple[type[Exception], ...] = (sqlite3.OperationalError, OSError), **options: Any,
    ) -> Any:  # fmt: skip
        """Read or change the state of a job, and repeat while the disk refuses: the end of a job is never dropped."""
        pause = 0.1
        while True:
            try:
                return await asyncio.to_thread(call, *values, **options)
            except repeat as error:
                log.error("the state of a job cannot be read or stored (%s); trying again in %g s", error, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 10.0)


class JobRun:
    """A job that the runner has, and its reports."""

    def __init__(self, job: Job, services: JobServices) -> None:
        self.job, self._own = job, services
        self.reported = True  # whether the runner has reported it finished, or was not sent it
        self.task: asyncio.Task[None] | None = None
        self._reports: asyncio.Queue[Report | WireError] = asyncio.Queue()

    def take(self, report: Report | WireError) -> None:
        """Take the next report about the job, or the error with which the runner ended."""
        self._reports.put_nowait(report)

    async def _receive(self) -> Report:
        report = await self._reports.get()
        if isinstance(report, WireError):
            raise report
        return report

    async def run(self) -> bool:
        """Run the job to its end, whatever that is; return whether the runner survived it."""
        job = self.job
        try:
            await self._run()
        except RunnerLostError as error:
            await self._requeue_lost(job, error)
            return False
        except WireError:
            await self._own.stored(self._own.store.retry_or_fail, job.id, "worker_crashed", CRASHED, lease=job.lease)
            return False
        except (StorageError, sqlite3.OperationalError, OSError) as error:
            log.error("the results of a job cannot be stored: %s", error)
            reason = "its results could not be stored; the disk of the worker is full or read-only"
            await self._end(job, "failed", error=Failure("storage", reason))
            await self._stop()
        except Exception as error:
            log.exception("a job ended in an internal error")
            await self._end(job, "failed", error=failure_of(error))
            await self._stop()
        return True

    async def _requeue_lost(self, job: Job, error: RunnerLostError) -> None:
        """Queue a job again whose runner was lost, without counting it as an attempt of the job."""
        losses = self._own.slot.count_loss(job.id)
        log.error("%s: its runner was lost: %s", job.id, error)
        if losses > MAX_LOSSES:
            failure = Failure("runner_lost", f"{LOST}, {losses} times")
            await self._own.stored(self._own.store.finish, job.id, "failed", error=failure, lease=job.lease)
        else:
            message = f"{LOST}; it is run again"
            await self._own.stored(self._own.store.put_back, job.id, "runner_lost", message, lease=job.lease)
        self._own.signals.work()

    async def _stop(self) -> None:
        """Have the runner stop the job, which ended here: a restart would lose the loaded models."""
        if self.reported:
            return
        with contextlib.suppress(WireError):
            await self._own.runner.send(Cancel(self.job.id))
            try:
                async with asyncio.timeout(PATIENCE):
                    while not isinstance(await self._receive(), Finished):
                        pass
            except TimeoutError:
                log.error("the model process does not react; it is killed")
                await self._own.runner.stop(now=True)

    async def _end(self, job: Job, state: State, **outcome: Any) -> None:
        await self._own.stored(self._own.store.finish, job.id, state, lease=job.lease, **outcome)

    async def _run(self) -> None:
        job = self.job
        try:
            resolved = await self._own.stored(self._own.resolve, job, repeat=(StoreLost,))
            files = await self._own.stored(self._own.store.files.inputs, job.id, repeat=(StoreLost,))
            inputs = {Path(name).stem: content for name, content in files.items()}
        except (InweaveError, OSError) as error:
            await self._end(job, "failed", error=failure_of(error))
            return
        options = {name: job.request[name] for name in RUN_OPTIONS if name in job.request}
        request = RunRequest(
            job.id, job.kind, resolved.model, job.request["config"], resolved.loras, inputs=inputs,
            paths=resolved.paths, name=job.model, lease=job.lease or "", upscalers=resolved.upscalers,
            models=resolved.models, **options,
        )  # fmt: skip
        self.reported = False
        self._own.slot.record_request(job, resolved.model, resolved.loras)
        await self._own.runner.send(request)
        watch = asyncio.create_task(self._watch())
        try:
            await self._follow(resolved.model)
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _follow(self, location: str) -> None:
        """Store the events of a job until it has ended; ``location``: of its model."""
        job = self.job
        files: list[str] = []  # of the images, in the order of the result
        loading: float | None = None
        while True:
            report = await self._receive()
            if loading is not None and job.kind != "train" and not isinstance(report, Finished):
                self._own.slot.record_load(job.model, location, time.monotonic() - loading)
                loading = None
            if isinstance(report, JobEvent):
                if report.event.type == "loading":
                    loading = time.monotonic()
                await record(self._own.store, job, report.event, files)
                self._own.signals.changed(job.id)
            elif isinstance(report, Finished):
                self.reported = True
                self._learn(job, report)
                await self._finish(job, report, files)
                return

    def _learn(self, job: Job, report: Finished) -> None:
        """Pass on to the scheduler what the runner holds, and how long it took to read what it did not hold."""
        reads = [each["apply_seconds"] for each in report.result.get("loras", ())]
        own = next((each for each in self._own.slot.view.jobs if each.id == job.id), None)
        if reads and own is not None and not self._own.slot.view.adapters.issuperset(own.adapters):
            self._own.slot.record_read(max(reads))
        self._own.slot.record_residency(report.residency)

    async def _finish(self, job: Job, report: Finished, files: list[str]) -> None:
        if not await self._own.stored(self._own.store.holds, job.id, job.lease):
            log.warning("%s: another process runs it now; this result is dropped", job.id)
        elif report.state == "done":
            for image, name in zip(report.result.get("images", ()), files, strict=False):
                image["file"] = name
            result = await self._own.stored(self._own.deliver, job, report.result, repeat=(StoreLost,))
            await self._end(job, "done", result=result)
        elif report.state == "failed":
            await self._end(job, "failed", error=report.error)
        elif self._own.stopping() and not (await self._own.stored(self._own.store.job, job.id)).cancel:
            await self._own.stored(
                self._own.store.put_back, job.id, lease=job.lease
            )  # stopped by `drain`, not by a client
        else:
            await self._end(job, "cancelled")

    async def _watch(self) -> None:
        """Pass a cancellation on; end a job that takes too long, and a runner that does not react."""
        job = self.job
        seconds = self._own.settings.train_seconds if job.kind == "train" else self._own.settings.job_seconds
        deadline = time.monotonic() + seconds
        while True:
            await self._own.signals.wait_for_change(job.id, max(0.0, min(1.0, deadline - time.monotonic())))
            late = time.monotonic() >= deadline
            current = await self._own.stored(self._own.store.job, job.id)
            lost = current.state != "running" or current.lease != job.lease
            if lost and self.reported:
                return  # it has ended
            if late or lost or current.cancel:
                break
        if lost and job.kind == "train":  # it would save a checkpoint where another process continues the run
            log.warning("%s: another process runs it now", job.id)
            await self._own.runner.stop(now=True)
            return
        if late and not lost:
            reason = f"it took longer than {seconds:g} s"
            await self._end(job, "failed", error=Failure("timeout", reason))
            self._own.signals.changed(job.id)
        with contextlib.suppress(WireError):
            await self._own.runner.send(Cancel(job.id))
        await asyncio.sleep(TRAIN_PATIENCE if job.kind == "train" and not late else PATIENCE)
        log.error("the model process does not react; it is killed")
        await self._own.runner.stop(now=True)
