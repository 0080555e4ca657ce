"""Takes jobs for one device, one at a time, and has a runner run them.

Which job comes next is the decision of the scheduler that all devices share (`inweave.serve.engine.assignment`).

Nothing is lost when a runner dies: its job is queued again once and fails the second time, and a new runner is started,
after a pause that grows while runners die without having finished a job. A job whose runner was lost with its machine
is queued again up to ``MAX_LOSSES`` times. Every event is stored before readers see it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from inweave.errors import InweaveError
from inweave.serve.engine.assignment import Assignments, DeviceSlot
from inweave.serve.engine.child_process import ProcessEndpoint
from inweave.serve.engine.contract import (
    Cancel,
    DeviceMemory,
    Finished,
    JobEvent,
    Load,
    Loaded,
    Ready,
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
from inweave.serve.settings import model_name

log = logging.getLogger("inweave.serve")
PAUSES = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
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
Answer = TypeVar("Answer", Ready, Loaded)
Status = Literal["starting", "loading", "ready", "failed", "stopping"]


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


class Dispatcher:
    """One device: its runner, and the job that runs on it."""

    def __init__(
        self,
        store: JobStore,
        signals: JobSignals,
        settings: DispatchSettings,
        resolve: Resolve,
        deliver: Deliver,
        runner: RunnerEndpoint | None = None,
        figures: Figures | None = None,
        slot: DeviceSlot | None = None,
    ) -> None:
        self._store, self._signals, self._settings = store, signals, settings
        self._figures = figures or Figures()
        self._resolve, self._deliver = resolve, deliver
        self.slot = slot or Assignments(store).add(settings.runner.device or "")
        self._runner: RunnerEndpoint = runner or ProcessEndpoint()
        self._deaths = 0
        self._stopping = False
        self._reported = True  # whether the runner reported the current job finished
        self.current: Job | None = None
        self.device = settings.runner.device  # the requested one until the runner reports its own
        self.memory: DeviceMemory | None = None  # of the device, as the runner reported it last
        self.status: Status = "starting"
        self.reason = "the model process is starting"
        self.finished_jobs = 0
        self.restarts = 0
        self.busy_seconds = 0.0

    async def run(self) -> None:
        """Run jobs until `drain`, and restart the runner whenever it dies."""
        while not self._stopping:
            try:
                await self._start()
                await self._serve()
            except WireError:
                await self._died()
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("the dispatcher failed; the model process is restarted")
                await self._died()
        await self._runner.stop()

    async def _start(self) -> None:
        self.status, self.reason = "starting", "the model process is starting"
        await self._runner.start(self._settings.runner)
        self.slot.view.node = self._runner.node
        self.device = (await self._answer(Ready)).device or self._settings.runner.device
        if self._settings.preload is not None:
            self.status, self.reason = "loading", "model loading"
            started = time.monotonic()
            await self._runner.send(Load(self._settings.preload))
            error = (await self._answer(Loaded)).error
            if error is not None:
                log.error("%s could not be loaded: %s", self._settings.preload, error.message)
                self.status, self.reason = "failed", f"the model could not be loaded: {error.message}"
                self.slot.view.ready = True  # other models may load
                return
            name = model_name(self._settings.preload)
            self.slot.record_load(name, self._settings.preload, time.monotonic() - started)
        self.status, self.reason = "ready", ""
        self.slot.view.ready = True

    async def _answer(self, kind: type[Answer]) -> Answer:
        """Return the next report, while no job runs; raise WireError if it is of another kind."""
        report = await self._receive()
        if not isinstance(report, kind):
            raise WireError(f"expected {kind.__name__}, got {type(report).__name__}")
        return report

    async def _receive(self) -> Report:
        """Return the next report of the runner, and remember the memory that it states."""
        report = await self._runner.receive()
        self.memory = getattr(report, "memory", None) or self.memory
        return report

    async def _serve(self) -> None:
        while not self._stopping:
            job, seconds = await self._claim()
            if job is None:
                await self._signals.wait_for_work(min(1.0, seconds or 1.0))
                if not self._runner.alive:
                    raise WireError("the model process is gone")
                continue
            if self._stopping:  # `drain` was called while the job was claimed
                await self._stored(self._store.put_back, job.id, lease=job.lease)
                self.slot.view.job = None
                return
            self._signals.changed(job.id)
            self._figures.started(job)
            log.info("%s started: %s, attempt %d", job.id, job.kind, job.attempts)
            self.current, self._reported = job, True
            started = time.monotonic()
            try:
                await self._run_job(job)
            except RunnerLostError as error:
                await self._requeue_lost(job, error)
                raise
            except WireError:
                await self._stored(self._store.retry_or_fail, job.id, "worker_crashed", CRASHED, lease=job.lease)
                raise
            except (StorageError, sqlite3.OperationalError, OSError) as error:
                log.error("the results of a job cannot be stored: %s", error)
                reason = "its results could not be stored; the disk of the worker is full or read-only"
                await self._end(job, "failed", error=Failure("storage", reason))
                await self._end_run(job)
            except Exception as error:
                log.exception("a job ended in an internal error")
                await self._end(job, "failed", error=failure_of(error))
                await self._end_run(job)
            finally:
                self.current = None
                self.busy_seconds += time.monotonic() - started
                self.slot.record_end(time.monotonic() - started)
                self._signals.changed(job.id)
                if self.slot.shared:
                    self._signals.work()  # a job may have waited for the end of this one
                await self._count(job)
            self.finished_jobs += 1
            self._deaths = 0

    async def _requeue_lost(self, job: Job, error: RunnerLostError) -> None:
        """Queue a job again whose runner was lost, without counting it as an attempt of the job."""
        losses = self.slot.count_loss(job.id)
        log.error("%s: its runner was lost: %s", job.id, error)
        if losses > MAX_LOSSES:
            failure = Failure("runner_lost", f"{LOST}, {losses} times")
            await self._stored(self._store.finish, job.id, "failed", error=failure, lease=job.lease)
        else:
            message = f"{LOST}; it is run again"
            await self._stored(self._store.put_back, job.id, "runner_lost", message, lease=job.lease)
        self._signals.work()

    async def _count(self, job: Job) -> None:
        with contextlib.suppress(InweaveError, sqlite3.Error):
            ended = await asyncio.to_thread(self._store.job, job.id)
            self._figures.ended(ended)
            log.info("%s ended: %s", job.id, ended.state)

    async def _claim(self) -> tuple[Job | None, float | None]:
        """Return the next job, without one when to ask again; no job also while the disk refuses to start one."""
        try:
            return await asyncio.to_thread(self.slot.claim)
        except (sqlite3.OperationalError, OSError) as error:
            log.error("no job can be started: %s", error)
            self.slot.view.job = None
            return None, None

    async def _end_run(self, job: Job) -> None:
        """Have the runner stop a job that ended here: a restart would lose the loaded models."""
        if not self._reported:
            await self._runner.send(Cancel(job.id))
            try:
                async with asyncio.timeout(PATIENCE):
                    while not (isinstance(report := await self._receive(), Finished) and report.job == job.id):
                        pass
            except TimeoutError:
                raise WireError("the model process does not react") from None

    async def _end(self, job: Job, state: State, **outcome: Any) -> None:
        await self._stored(self._store.finish, job.id, state, lease=job.lease, **outcome)

    async def _stored(
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

    async def _run_job(self, job: Job) -> None:
        try:
            resolved = await self._stored(self._resolve, job, repeat=(StoreLost,))
            files = await self._stored(self._store.files.inputs, job.id, repeat=(StoreLost,))
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
        self._reported = False
        self.slot.record_request(job, resolved.model, resolved.loras)
        await self._runner.send(request)
        watch = asyncio.create_task(self._watch(job))
        try:
            await self._follow(job, resolved.model)
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _follow(self, job: Job, location: str) -> None:
        """Store the events of a job until it has ended; ``location``: of its model."""
        files: list[str] = []  # of the images, in the order of the result
        loading: float | None = None
        while True:
            report = await self._receive()
            if loading is not None and job.kind != "train" and not isinstance(report, Finished):
                self.slot.record_load(job.model, location, time.monotonic() - loading)
                loading = None
            if isinstance(report, JobEvent) and report.job == job.id:
                if report.event.type == "loading":
                    loading = time.monotonic()
                await record(self._store, job, report.event, files)
                self._signals.changed(job.id)
            elif isinstance(report, Finished) and report.job == job.id:
                self._reported = True
                self._learn(report)
                await self._finish(job, report, files)
                return

    def _learn(self, report: Finished) -> None:
        """Pass on to the scheduler what the runner holds, and how long it took to read what it did not hold."""
        reads = [each["apply_seconds"] for each in report.result.get("loras", ())]
        job = self.slot.view.job
        if reads and job is not None and not self.slot.view.adapters.issuperset(job.adapters):
            self.slot.record_read(max(reads))
        self.slot.record_residency(report.residency)

    async def _finish(self, job: Job, report: Finished, files: list[str]) -> None:
        if not await self._stored(self._store.holds, job.id, job.lease):
            log.warning("%s: another process runs it now; this result is dropped", job.id)
        elif report.state == "done":
            for image, name in zip(report.result.get("images", ()), files, strict=False):
                image["file"] = name
            result = await self._stored(self._deliver, job, report.result, repeat=(StoreLost,))
            await self._end(job, "done", result=result)
        elif report.state == "failed":
            await self._end(job, "failed", error=report.error)
        elif self._stopping and not (await self._stored(self._store.job, job.id)).cancel:
            await self._stored(self._store.put_back, job.id, lease=job.lease)  # stopped by `drain`, not by a client
        else:
            await self._end(job, "cancelled")

    async def _watch(self, job: Job) -> None:
        """Pass a cancellation on; end a job that takes too long, and a runner that does not react."""
        seconds = self._settings.train_seconds if job.kind == "train" else self._settings.job_seconds
        deadline = time.monotonic() + seconds
        while True:
            await self._signals.wait_for_change(job.id, max(0.0, min(1.0, deadline - time.monotonic())))
            late = time.monotonic() >= deadline
            current = await self._stored(self._store.job, job.id)
            lost = current.state != "running" or current.lease != job.lease
            if lost and self._reported:
                return  # it has ended
            if late or lost or current.cancel:
                break
        if lost and job.kind == "train":  # it would save a checkpoint where another process continues the run
            log.warning("%s: another process runs it now", job.id)
            await self._runner.stop(now=True)
            return
        if late and not lost:
            reason = f"it took longer than {seconds:g} s"
            await self._end(job, "failed", error=Failure("timeout", reason))
            self._signals.changed(job.id)
        with contextlib.suppress(WireError):
            await self._runner.send(Cancel(job.id))
        await asyncio.sleep(TRAIN_PATIENCE if job.kind == "train" and not late else PATIENCE)
        log.error("the model process does not react; it is killed")
        await self._runner.stop(now=True)

    async def _died(self) -> None:
        code = await self._runner.stop(now=True)
        self.slot.record_death()
        self.restarts += 1
        self.memory = None
        if self._stopping:
            return
        pause = PAUSES[min(self._deaths, len(PAUSES) - 1)]
        self._deaths += 1
        self.status, self.reason = "starting", "the model process is being restarted"
        log.error("the model process ended (exit code %s); it is started again in %g s", code, pause)
        await asyncio.sleep(pause)

    async def drain(self, seconds: float) -> None:
        """Stop taking jobs and give the running one ``seconds``; afterwards it goes back to the queue.

        Training is not waited for: it saves a checkpoint, and continues from there after the next start.
        """
        self._stopping = True
        self.slot.view.ready = False
        self.status, self.reason = "stopping", "the worker is shutting down"
        self._signals.work()
        deadline = time.monotonic() + seconds
        if self.current is not None and self.current.kind == "train":
            with contextlib.suppress(WireError):
                await self._runner.send(Cancel(self.current.id))
        while self.current is not None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self.current is not None:
            try:
                await asyncio.to_thread(self._store.put_back, self.current.id, lease=self.current.lease)
            except (sqlite3.OperationalError, OSError) as error:  # the next start finds it running, and runs it again
                log.error("%s cannot be put back into the queue: %s", self.current.id, error)
        await self._runner.stop(now=self.current is not None)
