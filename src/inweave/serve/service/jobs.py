"""The queue, without blocking the event loop: every call of the store runs in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from inweave.errors import InweaveError
from inweave.serve.jobs.accounts import CURRENT
from inweave.serve.jobs.errors import GoneError, StoreLost
from inweave.serve.jobs.job import FINAL, Job, State, StoredEvent, Submission
from inweave.serve.jobs.signals import JobSignals
from inweave.serve.jobs.store import JobStore
from inweave.serve.jobs.usage import Usage

Answer = TypeVar("Answer")


class Jobs:
    """The jobs of a worker: submit, read, wait for, reorder, cancel, forget."""

    def __init__(self, store: JobStore, signals: JobSignals, usage: Usage) -> None:
        self._store, self._signals, self._usage = store, signals, usage
        self.limit = store.queue_limit

    async def submit(self, submission: Submission) -> tuple[Job, bool]:
        """Queue a job; return it, and whether it is new."""
        job, new = await asyncio.to_thread(self._queue, submission)
        if new:
            self._signals.work()
        return job, new

    def _queue(self, submission: Submission) -> tuple[Job, bool]:
        """Queue a job within the quotas of the caller's account."""
        account = CURRENT.get()
        if account is None:
            return self._store.submit(submission)
        return self._store.submit(replace(submission, account=account.name), self._usage.admission(account, submission))

    async def submitted(self, key: str | None, fingerprint: str) -> Job | None:
        """Return the job of an idempotency key; raise ConflictError if it was another request."""
        return None if key is None else await asyncio.to_thread(self._store.submitted, key, fingerprint)

    async def retry(self, job: str) -> Job:
        """Queue a new job with the request of one that ended."""
        retried, _ = await self.submit(await asyncio.to_thread(self._store.retry, job))
        return retried

    # reading

    async def get(self, job: str) -> Job:
        """Return a job, also an expired one; raise MissingError if it never existed."""
        return await asyncio.to_thread(self._store.job, job)

    async def present(self, job: str) -> Job:
        """Return a job; raise MissingError if it never existed, GoneError if it has expired."""
        current = await self.get(job)
        if current.expired:
            raise GoneError(f"job {current.id} ended as {current.state}; its results have expired")
        return current

    async def newest(
        self, *states: State, client: str | None = None, before: int | None = None, limit: int = 50
    ) -> list[Job]:
        """Return jobs in these states, or in any, newest first."""
        return await asyncio.to_thread(self._store.jobs, states=states, client=client, before=before, limit=limit)

    async def waiting_ids(self) -> list[str]:
        """Return the ids of all waiting jobs in the order they will run."""
        return await asyncio.to_thread(self._store.waiting_ids)

    async def last_event(self, job: str, *types: str) -> StoredEvent | None:
        """Return the newest event of a job that has one of these types."""
        return await asyncio.to_thread(self._store.last_event, job, *types)

    async def waiting(self, limit: int, client: str | None = None) -> list[Job]:
        """Return waiting jobs, of one client or of all, in the order they will run."""
        return await asyncio.to_thread(self._store.waiting, limit, client)

    async def position(self, job: Job) -> int | None:
        """Return how many jobs run before a waiting one."""
        return await asyncio.to_thread(self._store.position, job)

    async def count(self, *states: State) -> int:
        """Return the number of jobs in these states."""
        return await asyncio.to_thread(self.count_now, *states)

    def count_now(self, *states: State) -> int:
        """Return the number of jobs in these states, for callers in a thread."""
        return self._store.count(*states)

    async def events(self, job: str, after: int = 0) -> list[StoredEvent]:
        """Return the events of a job that follow number ``after``."""
        return await asyncio.to_thread(self._store.events, job, after)

    async def follow(self, job: str, after: int = 0) -> AsyncIterator[StoredEvent]:
        """Yield the events of a job as they come, up to the final one."""
        while True:
            change = asyncio.ensure_future(self._signals.wait_for_change(job, 1.0))
            try:
                events = await self.patiently(self._store.events, job, after)
                for event in events:
                    after = event.number
                    yield event
                    if event.type in FINAL:
                        return
                if not events:
                    current = await self.patiently(self._store.job, job)
                    if current.expired or (current.final and not await self.events(job, after)):
                        return
                    await change
            finally:
                change.cancel()

    async def patiently(self, read: Callable[..., Answer], *values: object) -> Answer:
        """Return what a store answers: a restart of a store interrupts no stream."""
        while True:
            try:
                return await asyncio.to_thread(read, *values)
            except StoreLost:
                await asyncio.sleep(0.5)

    async def wait(self, job: str, seconds: float) -> Job:
        """Return a job once it has ended, or in its current state after ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            waiter = asyncio.ensure_future(self._signals.wait_for_change(job, 1.0))
            current = await self.patiently(self._store.job, job)
            if current.final or time.monotonic() >= deadline:
                waiter.cancel()
                return current
            await waiter

    async def file(self, job: str, name: str) -> Path | bytes:
        """Return a file of a job's result, by its path if it is one of this machine; raise MissingError."""
        return await asyncio.to_thread(lambda: self._store.files.path(job, name) or self.read(job, name))

    def read(self, job: str, name: str) -> bytes:
        """Return a file of a job's result, for callers in a thread; raise MissingError if there is none."""
        return self._store.files.read(job, name)

    async def images(self, job: Job) -> list[bytes]:
        """Return the images of a job that is done, as PNG."""
        names = [image["file"] for image in (job.result or {}).get("images", ())]
        return [await asyncio.to_thread(self.read, job.id, name) for name in names]

    # control

    async def cancel(self, job: str) -> Job:
        """End a waiting job now, a running one after its current step."""
        cancelled = await asyncio.to_thread(self._store.cancel, job)
        self._signals.changed(job)
        return cancelled

    async def abandon(self, job: str) -> None:
        """Cancel a job whose only reader left, unless it has ended."""
        with contextlib.suppress(InweaveError):
            await self.cancel(job)

    async def move(self, job: str, position: int) -> Job:
        """Move a waiting job to another place in the queue: 0 runs next."""
        return await asyncio.to_thread(self._store.move, job, position)

    async def prioritize(self, job: str, priority: int) -> Job:
        """Change the priority of a waiting job."""
        return await asyncio.to_thread(self._store.prioritize, job, priority)

    async def delete(self, job: str) -> None:
        """Forget a job that ended."""
        await asyncio.to_thread(self._store.delete, job)

    async def delete_image(self, job: str, name: str) -> None:
        """Remove one image of a job that ended; without its last one the job is forgotten."""
        await asyncio.to_thread(self._store.delete_image, job, name)

    async def paused(self) -> bool:
        """Return whether waiting jobs are held back."""
        return await asyncio.to_thread(lambda: self._store.paused)

    async def pause(self, paused: bool) -> None:
        """Pause or resume the queue; the running job goes on."""
        await asyncio.to_thread(self._store.pause, paused)
        self._signals.work()
