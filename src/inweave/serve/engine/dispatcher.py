"""Takes jobs for one device and has a runner run them, as many at a time as the runner makes together.

Which job comes next is the decision of the scheduler that all devices share (`inweave.serve.engine.assignment`).

Nothing is lost when a runner dies: each of its jobs is queued again once, then runs alone, and fails the second time;
and a new runner is started, after a pause that grows while runners die without having finished a job. A job whose
runner was lost with its machine is queued again up to ``MAX_LOSSES`` times. Every event is stored before readers see
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
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
    Room,
    RunnerEndpoint,
)
from inweave.serve.engine.job_run import Deliver, JobRun, JobServices, Resolve
from inweave.serve.engine.job_run import DispatchSettings as DispatchSettings
from inweave.serve.engine.job_run import Resolved as Resolved
from inweave.serve.engine.wire import WireError
from inweave.serve.jobs.figures import Figures
from inweave.serve.jobs.job import Job
from inweave.serve.jobs.signals import JobSignals
from inweave.serve.jobs.store import JobStore
from inweave.serve.settings import model_name

log = logging.getLogger("inweave.serve")
PAUSES = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
Answer = TypeVar("Answer", Ready, Loaded)
Status = Literal["starting", "loading", "ready", "failed", "stopping"]


class Dispatcher:
    """One device: its runner, and the jobs that run on it."""

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
        self.slot = slot or Assignments(store).add(settings.runner.device or "")
        self._runner: RunnerEndpoint = runner or ProcessEndpoint()
        self._services = JobServices(
            store, signals, settings, resolve, deliver, self._runner, self.slot, self._figures, lambda: self._stopping
        )
        self._deaths = 0
        self._stopping = False
        self._runs: dict[str, JobRun] = {}  # by job, the oldest first
        self._room = 1  # how many jobs like the running ones the runner takes in all
        self._ended = asyncio.Event()  # a job ended, there is more room, or the runner is gone
        self._busy_since = 0.0
        self.device = settings.runner.device  # the requested one until the runner reports its own
        self.memory: DeviceMemory | None = None  # of the device, as the runner reported it last
        self.status: Status = "starting"
        self.reason = "the model process is starting"
        self.finished_jobs = 0
        self.restarts = 0
        self.busy_seconds = 0.0

    @property
    def current(self) -> Job | None:
        """The job that runs, the oldest of several."""
        return next((run.job for run in self._runs.values()), None)

    @property
    def running(self) -> list[Job]:
        """All jobs that run."""
        return [run.job for run in self._runs.values()]

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
        reading = asyncio.create_task(self._read())
        try:
            await self._run_jobs(reading)
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            raise
        except Exception:
            if not reading.done():
                await self._runner.stop(now=True)
            raise
        finally:
            reading.cancel()  # if the runner still lives, its jobs count as those of a dead one
            await asyncio.gather(reading, *self._tasks, return_exceptions=True)

    @property
    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for run in self._runs.values() if (task := run.task) is not None]

    async def _run_jobs(self, reading: asyncio.Task[None]) -> None:
        """Claim jobs and begin them until `drain`, and until those have ended; raise WireError with the runner."""
        while not self._stopping and not reading.done():
            self._ended.clear()
            if self._runs and len(self._runs) >= self._room:
                await self._wait(1.0)
                continue
            job, seconds = await self._claim()
            if job is None:
                await self._wait(min(1.0, seconds or 1.0), for_work=True)
                if not self._runner.alive:
                    raise WireError("the model process is gone")
                continue
            if self._stopping or reading.done():  # `drain` was called, or the runner died, while it was claimed
                await self._services.stored(self._store.put_back, job.id, lease=job.lease)
                self.slot.release(job.id)
                break
            self._begin(job)
        while self._runs:
            self._ended.clear()
            await self._wait(1.0)
        if reading.done():
            await reading

    async def _wait(self, seconds: float, *, for_work: bool = False) -> None:
        """Wait until a job ends, there is more room or the runner is gone; ``for_work``: or until a job waits."""
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(self._ended.wait())]
        if for_work:
            waits.append(asyncio.create_task(self._signals.wait_for_work(seconds)))
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _read(self) -> None:
        """Route the reports of the runner to its jobs, until it is gone."""
        error = WireError("the runner is gone")
        try:
            while True:
                report = await self._receive()
                if isinstance(report, Room):
                    self._room, self.slot.view.mixed = report.jobs, report.mixed
                    self._ended.set()
                elif isinstance(report, JobEvent | Finished) and (run := self._runs.get(report.job)) is not None:
                    run.take(report)
        except WireError as reason:
            error = reason
            raise
        finally:
            for run in self._runs.values():
                run.take(error)
            self._ended.set()

    def _begin(self, job: Job) -> None:
        self._signals.changed(job.id)
        self._figures.started(job)
        candidate = next((each for each in self.slot.view.jobs if each.id == job.id), None)
        if candidate is not None and candidate.adapters:
            self._figures.placed(self.slot.view.adapters.issuperset(candidate.adapters))
        log.info("%s started: %s, attempt %d", job.id, job.kind, job.attempts)
        if not self._runs:
            self._room, self._busy_since = 1, time.monotonic()
        run = self._runs[job.id] = JobRun(job, self._services)
        run.task = asyncio.create_task(self._run(run))

    async def _run(self, run: JobRun) -> None:
        job, started = run.job, time.monotonic()
        survived: bool = False
        try:
            survived = await run.run()
        finally:
            del self._runs[job.id]
            self.slot.record_end(job.id, time.monotonic() - started)
            if not self._runs:
                self.busy_seconds += time.monotonic() - self._busy_since
            self._signals.changed(job.id)
            self._ended.set()
            if self.slot.shared:
                self._signals.work()  # a job may have waited for the end of this one
        if survived:
            self.finished_jobs += 1
            self._deaths = 0
        await self._count(job)

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
            return None, None

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
        for job in self.running:
            if job.kind == "train":
                with contextlib.suppress(WireError):
                    await self._runner.send(Cancel(job.id))
        while self._runs and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        left = self.running
        for job in left:
            try:
                await asyncio.to_thread(self._store.put_back, job.id, lease=job.lease)
            except (sqlite3.OperationalError, OSError) as error:  # the next start finds it running, and runs it again
                log.error("%s cannot be put back into the queue: %s", job.id, error)
        await self._runner.stop(now=bool(left))
