"""Takes jobs from the store, one at a time, and has a model process run them.

A process that dies takes nothing with it: its job is queued again once and fails the second time, and a new process is
started, after a pause that doubles while processes die without having finished a job. Everything a job says is stored
before readers hear of it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from inweave.errors import InweaveError
from inweave.serve.engine.child_process import ChildProcess
from inweave.serve.engine.wire import Message, WireError
from inweave.serve.jobs.errors import StorageError
from inweave.serve.jobs.failures import failure_of
from inweave.serve.jobs.job import Event, Failure, Job
from inweave.serve.jobs.signals import JobSignals
from inweave.serve.jobs.store import JobStore

log = logging.getLogger("inweave.serve")
PAUSES = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
#: seconds after a cancellation or a time-out until the process is killed
PATIENCE = 30.0
#: the same for training, which saves its checkpoint after a step that may be long
TRAIN_PATIENCE = 600.0
CRASHED = "the process that ran it ended unexpectedly"
Status = Literal["starting", "loading", "ready", "failed", "stopping"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a job needs of this machine: the model to open, the files of LoRAs, folders of a train job."""

    model: str
    loras: dict[str, str]
    paths: dict[str, str]


#: raises our errors where something is gone since the job was submitted
Resolve = Callable[[Job], Resolved]
#: called with a finished job's result before it is stored; may change it
Deliver = Callable[[Job, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """What a dispatcher tells its process, and how long a job may take."""

    device: str | None = None
    dtype: str | None = None
    memory_bytes: int | None = None
    preload: str | None = None
    job_seconds: float = 3600.0
    train_seconds: float = 7 * 24 * 3600.0
    folders: tuple[str, ...] = ()  # of the library: its process opens nothing through links that lead out of them


class Dispatcher:
    """One device: its process, and the job that runs on it."""

    def __init__(
        self, store: JobStore, signals: JobSignals, settings: DispatchSettings, resolve: Resolve, deliver: Deliver
    ) -> None:
        self._store, self._signals, self._settings = store, signals, settings
        self._resolve, self._deliver = resolve, deliver
        self._process = ChildProcess("inweave.serve.engine.model_process")
        self._deaths = 0
        self._stopping = False
        self._reported = True  # whether the process has told the end of the current job
        self.current: Job | None = None
        self.device = settings.device  # what was asked for, then what it is
        self.status: Status = "starting"
        self.reason = "the model process is starting"
        self.finished_jobs = 0
        self.restarts = 0
        self.busy_seconds = 0.0

    async def run(self) -> None:
        """Until `drain`: run jobs, restart the process whenever it dies."""
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
        await self._process.stop()

    async def _start(self) -> None:
        self.status, self.reason = "starting", "the model process is starting"
        settings = asdict(self._settings)
        await self._process.start({name: settings[name] for name in ("device", "dtype", "memory_bytes", "folders")})
        self.device = (await self._process.receive()).data["device"] or self._settings.device
        if self._settings.preload is not None:
            self.status, self.reason = "loading", "model loading"
            await self._process.send(Message("load", {"model": self._settings.preload}))
            error = (await self._process.receive()).data.get("error")
            if error is not None:
                log.error("%s could not be loaded: %s", self._settings.preload, error["message"])
                self.status, self.reason = "failed", f"the model could not be loaded: {error['message']}"
                return
        self.status, self.reason = "ready", ""

    async def _serve(self) -> None:
        while not self._stopping:
            job = await self._claim()
            if job is None:
                await self._signals.wait_for_work(1.0)
                if self._process.pid is None:
                    raise WireError("the model process is gone")
                continue
            if self._stopping:  # it was claimed in the very moment
                await self._stored(self._store.put_back, job.id)
                return
            self._signals.changed(job.id)
            self.current, self._reported = job, True
            started = time.monotonic()
            try:
                await self._run_job(job)
            except WireError:
                await self._stored(self._store.retry_or_fail, job.id, "worker_crashed", CRASHED)
                raise
            except (StorageError, sqlite3.OperationalError, OSError) as error:
                log.error("the results of a job cannot be stored: %s", error)
                reason = "its results could not be stored; the disk of the worker is full or read-only"
                await self._stored(self._store.finish, job.id, "failed", error=Failure("storage", reason))
                await self._end_run(job)
            except Exception as error:
                log.exception("a job ended in an internal error")
                await self._stored(self._store.finish, job.id, "failed", error=failure_of(error))
                await self._end_run(job)
            finally:
                self.current = None
                self.busy_seconds += time.monotonic() - started
                self._signals.changed(job.id)
            self.finished_jobs += 1
            self._deaths = 0

    async def _claim(self) -> Job | None:
        """The next job; None also while the disk refuses to note that it runs."""
        try:
            return await asyncio.to_thread(self._store.claim)
        except (sqlite3.OperationalError, OSError) as error:
            log.error("no job can be started: %s", error)
            return None

    async def _end_run(self, job: Job) -> None:
        """Have the process stop a job that ended here; a loaded model is worth more than a restart."""
        if not self._reported:
            await self._process.send(Message("cancel", {"job": job.id}))
            try:
                async with asyncio.timeout(PATIENCE):
                    while (message := await self._process.receive()).type != "finished" or message.data[
                        "job"
                    ] != job.id:
                        pass
            except TimeoutError:
                raise WireError("the model process does not react") from None

    async def _stored(self, change: Callable[..., Any], *values: Any, **options: Any) -> None:
        """Make a change of state, however long the disk refuses it: the end of a job is never dropped."""
        pause = 0.1
        while True:
            try:
                await asyncio.to_thread(change, *values, **options)
                return
            except (sqlite3.OperationalError, OSError) as error:
                log.error("the state of a job cannot be stored (%s); trying again in %g s", error, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 10.0)

    async def _run_job(self, job: Job) -> None:
        try:
            resolved = await asyncio.to_thread(self._resolve, job)
            files = await asyncio.to_thread(self._store.files.inputs, job.id)
            blobs = [await asyncio.to_thread(path.read_bytes) for path in files.values()]
        except (InweaveError, OSError) as error:
            await self._stored(self._store.finish, job.id, "failed", error=failure_of(error))
            return
        data = {
            "job": job.id, "kind": job.kind, "model": resolved.model, "config": job.request["config"],
            "loras": resolved.loras, "paths": resolved.paths, "preview_every": job.request.get("preview_every", 0),
            "inputs": list(files), "on_mismatch": job.request.get("on_mismatch", "error"),
            "preview_first": job.request.get("preview_first", False), "name": job.model,
        }  # fmt: skip
        self._reported = False
        await self._process.send(Message("run", data, tuple(blobs)))
        watch = asyncio.create_task(self._watch(job))
        try:
            await self._follow(job)
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _follow(self, job: Job) -> None:
        """Store what the process says of a job until it has ended."""
        results: list[dict[str, Any]] = []
        while True:
            message = await self._process.receive()
            if message.data.get("job") != job.id:
                continue
            if message.type == "finished":
                self._reported = True
                await self._finish(job, message.data, results)
                return
            event = await asyncio.to_thread(self._keep, job, message, results)
            await asyncio.to_thread(self._store.append, job.id, event)
            self._signals.changed(job.id)

    def _keep(self, job: Job, message: Message, results: list[dict[str, Any]]) -> Event:
        """The event to store: pictures of a result become files, previews travel in the event."""
        kind, data = message.data["event"], dict(message.data["data"])
        if kind == "image" and message.blobs:
            name = f"{data['index']}.png"
            self._store.files.write(job.id, name, message.blobs[0])
            data["file"] = name
            results.append(data)
        elif kind == "sample" and message.blobs:  # many of them in a run, and each is looked at again and again
            name = f"{data['step']:06d}-{data['index']}.png"
            self._store.files.write(job.id, name, message.blobs[0])
            data |= {"file": name, "url": f"/v1/jobs/{job.id}/files/{name}"}
        elif message.blobs:
            data["image"] = base64.b64encode(message.blobs[0]).decode()
            data["format"] = "png"
        return Event(kind, data)

    async def _finish(self, job: Job, data: dict[str, Any], results: list[dict[str, Any]]) -> None:
        state = data["state"]
        if state == "done":
            result = await asyncio.to_thread(self._deliver, job, data["result"])
            for image, stored in zip(result.get("images", ()), results, strict=False):
                image["file"] = stored["file"]
            await self._stored(self._store.finish, job.id, "done", result=result)
        elif state == "failed":
            await self._stored(self._store.finish, job.id, "failed", error=Failure(**data["error"]))
        elif self._stopping and not (await asyncio.to_thread(self._store.job, job.id)).cancel:
            await self._stored(self._store.put_back, job.id)  # `drain` ended it, nobody cancelled it
        else:
            await self._stored(self._store.finish, job.id, "cancelled")

    async def _watch(self, job: Job) -> None:
        """Pass a cancellation on; end a job that takes too long, and a process that does not react."""
        seconds = self._settings.train_seconds if job.kind == "train" else self._settings.job_seconds
        deadline = time.monotonic() + seconds
        while True:
            await self._signals.wait_for_change(job.id, max(0.0, min(1.0, deadline - time.monotonic())))
            late = time.monotonic() >= deadline
            current = await asyncio.to_thread(self._store.job, job.id)
            if current.state != "running":
                return  # nothing to watch over any more
            if late or current.cancel:
                break
        if late:
            reason = f"it took longer than {seconds:g} s"
            await self._stored(self._store.finish, job.id, "failed", error=Failure("timeout", reason))
            self._signals.changed(job.id)
        with contextlib.suppress(WireError):
            await self._process.send(Message("cancel", {"job": job.id}))
        await asyncio.sleep(TRAIN_PATIENCE if job.kind == "train" and not late else PATIENCE)
        log.error("the model process does not react; it is killed")
        await self._process.stop(now=True)

    async def _died(self) -> None:
        code = await self._process.stop(now=True)
        self.restarts += 1
        if self._stopping:
            return
        pause = PAUSES[min(self._deaths, len(PAUSES) - 1)]
        self._deaths += 1
        self.status, self.reason = "starting", "the model process is being restarted"
        log.error("the model process ended (exit code %s); it is started again in %g s", code, pause)
        await asyncio.sleep(pause)

    async def drain(self, seconds: float) -> None:
        """Stop taking jobs, give the running one ``seconds``; what is left of it goes back to the queue.

        Training is not waited for: it saves a checkpoint, and continues from there after the next start.
        """
        self._stopping = True
        self.status, self.reason = "stopping", "the worker is shutting down"
        self._signals.work()
        deadline = time.monotonic() + seconds
        if self.current is not None and self.current.kind == "train":
            with contextlib.suppress(WireError):
                await self._process.send(Message("cancel", {"job": self.current.id}))
        while self.current is not None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self.current is not None:
            await asyncio.to_thread(self._store.put_back, self.current.id)
        await self._process.stop(now=self.current is not None)
