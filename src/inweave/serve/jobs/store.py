"""The queue on disk: jobs and their events in SQLite, images in files next to it.

    jobs.sqlite3          one row per job, one row per event
    files/<job>/<name>    see `inweave.serve.jobs.files`

A submission survives the death of every process: it is committed and synchronized before any client gets its job id.
Each change of state is one transaction together with its event, and only happens from the expected state, so a job ends
exactly once even if several callers try to end it. One process opens the store at a time.

Retention: finished jobs are kept for ``keep_seconds`` and within ``keep_bytes``, the oldest expire first. The row of an
expired job says so, without events, request or files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inweave.errors import BusyError, ConflictError, MissingError
from inweave.serve.jobs.candidate import Candidate
from inweave.serve.jobs.job import (
    FINAL,
    MAX_ATTEMPTS,
    Event,
    Failure,
    Job,
    State,
    Submission,
    new_id,
)
from inweave.serve.jobs.ordering import priorities_after_move
from inweave.serve.jobs.queries import JobQueries
from inweave.serve.jobs.training_runs import resumed_request

#: rows of expired jobs; beyond this number, the oldest are deleted
TOMBSTONES = 100_000


class JobStore(JobQueries):
    """All jobs of a worker. Safe to call from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        queue_limit: int = 1000,
        keep_seconds: float = 24 * 3600,
        keep_bytes: int = 4 * 1024**3,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(folder, clock=clock)
        self.queue_limit = queue_limit
        self.keep_seconds = keep_seconds
        self.keep_bytes = keep_bytes

    # submitting

    def submit(self, submission: Submission) -> tuple[Job, bool]:
        """Return (the job, whether it is new); an idempotency key that was used before returns its job in any state."""
        key = submission.idempotency_key
        with self._lock:
            if key is not None and (known := self.submitted(key, submission.fingerprint)) is not None:
                return known, False
            waiting = self.count("queued")
            if waiting >= self.queue_limit:
                raise BusyError(f"the queue is full: {waiting} jobs are waiting, {self.queue_limit} are allowed")
            job = new_id()
            size = self.files.write_inputs(job, submission.inputs)
            try:
                with self._transaction():
                    self._db.execute(
                        "INSERT INTO jobs (id, kind, model, state, priority, client, request, created, bytes, "
                        "idempotency_key, fingerprint) VALUES (?, ?, ?, 'queued', ?, ?, ?, ?, ?, ?, ?)",
                        (job, submission.kind, submission.model, submission.priority, submission.client,
                         json.dumps(submission.request), self._clock(), size, key, submission.fingerprint),
                    )  # fmt: skip
                    self._append(job, Event("queued", {"kind": submission.kind, "model": submission.model}))
            except BaseException:
                self.files.remove(job)
                raise
            return self.job(job), True

    # running

    def claim(self, chosen: Callable[[list[Candidate]], str | None] | None = None, window: int = 1) -> Job | None:
        """Start a job and return it; None if none is waiting or the queue is paused.

        Args:
            chosen: returns the id of one of the first waiting jobs, or None for none now; default: the first one.
            window: how many image jobs and how many train jobs it may choose from.
        """
        with self._lock:
            if self.paused or not (candidates := self.candidates(window)):
                return None
            choice = candidates[0].id if chosen is None else chosen(candidates)
            if choice is None:
                return None
            job = self.job(choice)
            with self._transaction():
                change = "UPDATE jobs SET state = 'running', attempts = attempts + 1, started = ? WHERE id = ?"
                self._db.execute(change, (self._clock(), job.id))
                self._append(job.id, Event("started", {"attempt": job.attempts + 1}))
            return self.job(job.id)

    def append(self, job: str, event: Event) -> bool:
        """Record an event of a running job; return False if the job is no longer running."""
        with self._lock:
            if (row := self._row("id = ?", job)) is None or row[0].state != "running":
                return False
            with self._transaction():
                self._append(job, event)
            return True

    def finish(
        self, job: str, state: State, *, result: dict[str, Any] | None = None, error: Failure | None = None
    ) -> bool:
        """End a running job; return False if it has ended already."""
        data = result if result is not None else error.as_dict() if error is not None else {}
        with self._lock, self._transaction():
            changed = self._db.execute(
                "UPDATE jobs SET state = ?, finished = ?, result = ?, error = ?, bytes = bytes + ? + "
                "(SELECT coalesce(sum(length(data)), 0) FROM events WHERE job = jobs.id) "
                "WHERE id = ? AND state = 'running'",
                (state, self._clock(), json.dumps(result) if result is not None else None,
                 json.dumps(error.as_record()) if error is not None else None, self.files.result_bytes(job), job),
            )  # fmt: skip
            if changed.rowcount != 1:
                return False
            self._append(job, Event(state, data))
            return True

    def retry_or_fail(self, job: str, code: str, cause: str) -> State:
        """Queue a job whose process died again, or fail it if that happened before; return its new state."""
        with self._lock:
            row = self.job(job)
            if row.state != "running":
                return row.state
            if row.cancel:
                self.finish(job, "cancelled")
                return "cancelled"
            if row.attempts >= MAX_ATTEMPTS:
                self.finish(job, "failed", error=Failure(code, f"{cause}, {MAX_ATTEMPTS} times"))
                return "failed"
            with self._transaction():
                self._db.execute("UPDATE jobs SET state = 'queued' WHERE id = ? AND state = 'running'", (job,))
                self._append(job, Event("retried", {"code": code, "message": f"{cause}; it is run once more"}))
            return "queued"

    def put_back(self, job: str, code: str = "worker_stopped", message: str = "the worker was shut down") -> None:
        """Return a running job to the queue as if it had never been started: its runner ended for another reason."""
        with self._lock, self._transaction():
            changed = self._db.execute(
                "UPDATE jobs SET state = 'queued', attempts = attempts - 1 WHERE id = ? AND state = 'running'", (job,)
            )
            if changed.rowcount == 1:
                self._append(job, Event("retried", {"code": code, "message": message}))

    def recover(self) -> None:
        """Requeue or fail the jobs that were running when the last process died, and remove files without a job."""
        for job in self.jobs(states=("running",), limit=10_000):
            self.retry_or_fail(job.id, "worker_restarted", "the worker was killed while it ran this job")
        with self._lock:
            known = {row[0] for row in self._db.execute("SELECT id FROM jobs WHERE expired = 0")}
        self.files.remove_all_but(known)

    # control

    def cancel(self, job: str) -> Job:
        """End a waiting job, or ask for the end of a running one; raise ConflictError if it is done or failed."""
        with self._lock:
            row = self.job(job)
            if row.state == "queued":
                with self._transaction():
                    self._db.execute(
                        "UPDATE jobs SET state = 'cancelled', cancel = 1, finished = ? WHERE id = ?",
                        (self._clock(), job),
                    )
                    self._append(job, Event("cancelled"))
            elif row.state == "running":
                with self._transaction():
                    self._db.execute("UPDATE jobs SET cancel = 1 WHERE id = ?", (job,))
            elif row.state != "cancelled":
                raise ConflictError(f"job {job} has ended: {row.state}")
            return self.job(job)

    def retry(self, job: str) -> Submission:
        """Return a new submission like a finished job, with its inputs; interrupted training is resumed."""
        with self._lock:
            row = self.job(job)
            if row.expired:
                raise ConflictError(f"job {job} expired, and its request with it")
            if not row.final:
                raise ConflictError(f"job {job} is {row.state}")
            inputs = {path.name.removeprefix("input-"): path.read_bytes() for path in self.files.inputs(job).values()}
            request = resumed_request(row) if row.kind == "train" else row.request
            return Submission(row.kind, row.model, request, inputs, row.priority, row.client)

    def prioritize(self, job: str, priority: int) -> Job:
        """Change the priority of a waiting job."""
        with self._lock:
            row = self.job(job)
            if row.state != "queued":
                raise ConflictError(f"job {job} is {row.state}; only waiting jobs have a priority")
            with self._transaction():
                self._db.execute("UPDATE jobs SET priority = ? WHERE id = ?", (priority, job))
            return self.job(job)

    def move(self, job: str, position: int) -> Job:
        """Move a job to another place among the waiting ones, regardless of their priorities; 0 runs next."""
        with self._lock:
            row = self.job(job)
            if row.state != "queued":
                raise ConflictError(f"job {job} is {row.state}; only waiting jobs have a place in the queue")
            query = "SELECT id, number, priority FROM jobs WHERE state = 'queued' ORDER BY priority DESC, number"
            changes = priorities_after_move(self._db.execute(query).fetchall(), job, position)
            with self._transaction():
                self._db.executemany(
                    "UPDATE jobs SET priority = ? WHERE id = ?", [(p, name) for name, p in changes.items()]
                )
            return self.job(job)

    def pause(self, paused: bool) -> None:
        """Hold waiting jobs back, also across restarts, or release them; the running job continues."""
        with self._lock, self._transaction():
            self._db.execute("INSERT OR REPLACE INTO settings VALUES ('paused', ?)", ("1" if paused else "0",))

    # retention

    def expire(self) -> int:
        """Forget jobs that exceed the limits of age and size; return how many expired."""
        ended = f"state IN ({', '.join(repr(state) for state in FINAL)}) AND expired = 0"
        with self._lock:
            rows = self._db.execute(
                f"SELECT id, finished, bytes FROM jobs WHERE {ended} ORDER BY number DESC"
            ).fetchall()
            limit, total, gone = self._age_clock() - self.keep_seconds, 0, []
            for job, finished, size in rows:
                total += size
                if finished < limit or total > self.keep_bytes:
                    gone.append(job)
            for job in gone:
                self._forget(job)
            with self._transaction():
                self._db.execute(
                    "DELETE FROM jobs WHERE expired = 1 AND number <= (SELECT max(number) FROM jobs) - ?", (TOMBSTONES,)
                )
        return len(gone)

    def delete(self, job: str) -> None:
        """Forget a finished job."""
        with self._lock:
            if not self.job(job).final:
                raise ConflictError(f"job {job} has not ended; cancel it first")
            self._forget(job)

    def delete_image(self, job: str, name: str) -> None:
        """Remove one image of a finished job; the job is forgotten with its last image."""
        with self._lock:
            row = self.job(job)
            images = [image for image in (row.result or {}).get("images", ()) if image["file"] != name]
            if not row.final or row.result is None or len(images) == len(row.result.get("images", ())):
                raise MissingError(f"job {job} has no image {name[:100]}")
            if not images:
                self._forget(job)
                return
            with self._transaction():
                result = json.dumps({**row.result, "images": images})
                self._db.execute("UPDATE jobs SET result = ? WHERE id = ?", (result, job))
            self.files.result(job, name).unlink(missing_ok=True)

    def _forget(self, job: str) -> None:
        with self._transaction():
            self._db.execute(
                "UPDATE jobs SET expired = 1, request = '{}', result = NULL, bytes = 0, client = '' WHERE id = ?",
                (job,),
            )
            self._db.execute("DELETE FROM events WHERE job = ?", (job,))
        self.files.remove(job)
