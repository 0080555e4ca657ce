"""The queue on disk: jobs and their events in SQLite, pictures in files next to it.

    jobs.sqlite3          one row per job, one row per event
    files/<job>/<name>    see `job_files`

What was answered with a job id survives the death of every process: a submission is committed and synchronized
before its id is known to anybody. Each change of state is one transaction together with its event, and only happens
from the state it expects, so a job ends exactly once whoever tries to end it. One process opens the store at a time.

Retention: jobs that ended are kept for ``keep_seconds`` and within ``keep_bytes`` (oldest first); afterwards their
row says that they expired, without events, request or files.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from inweave.errors import BusyError, ConflictError, MissingError
from inweave.serve.jobs.files import JobFiles, own_folder
from inweave.serve.jobs.job import (
    FINAL,
    MAX_ATTEMPTS,
    Event,
    Failure,
    Job,
    Kind,
    State,
    StoredEvent,
    Submission,
    new_id,
)
from inweave.serve.jobs.ordering import priorities_after_move
from inweave.serve.jobs.schema import COLUMNS, SCHEMA, VERSION, job_of
from inweave.serve.jobs.training_runs import resumed_request

#: jobs that ended and expired; beyond this many, the oldest are forgotten
TOMBSTONES = 100_000


class JobStore:
    """All jobs of a worker. Safe to call from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        queue_limit: int = 1000,
        keep_seconds: float = 24 * 3600,
        keep_bytes: int = 4 * 1024**3,
        clock: Callable[[], float] = time.time,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.files = JobFiles(folder / "files")
        self.queue_limit = queue_limit
        self.keep_seconds = keep_seconds
        self.keep_bytes = keep_bytes
        self._clock = clock
        self._lock = threading.RLock()
        self._ownership = own_folder(folder)
        self._db = sqlite3.connect(folder / "jobs.sqlite3", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            raise ConflictError(
                f"{folder}: written by another version of inweave (layout {version}, this is {VERSION})"
            )
        self._db.executescript(SCHEMA)
        self._db.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        with self._lock:
            self._db.close()
            self._ownership.close()

    # submitting

    def submit(self, submission: Submission) -> tuple[Job, bool]:
        """(the job, whether it is new); a key that was used before returns its job, whatever became of it."""
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

    def submitted(self, key: str, fingerprint: str) -> Job | None:
        """The job of an idempotency key; `ConflictError` where it was another request."""
        with self._lock:
            known = self._row("idempotency_key = ?", key)
        if known is None:
            return None
        if known[1] != fingerprint:
            raise ConflictError("this idempotency key was used for another request")
        return known[0]

    # reading

    def job(self, job: str) -> Job:
        """The job, or `MissingError`."""
        with self._lock:
            row = self._row("id = ?", job)
        if row is None:
            raise MissingError(f"there is no job {job}")
        return row[0]

    def jobs(
        self, *, states: tuple[State, ...] = (), kind: Kind | None = None, before: int | None = None, limit: int = 50
    ) -> list[Job]:
        """The newest first; ``before`` is the number of the last one of the page before."""
        where, values = ["expired = 0"], list[Any]()
        if states:
            where.append(f"state IN ({', '.join('?' * len(states))})")
            values += states
        if kind is not None:
            where.append("kind = ?")
            values.append(kind)
        if before is not None:
            where.append("number < ?")
            values.append(before)
        query = f"SELECT {COLUMNS} FROM jobs WHERE {' AND '.join(where)} ORDER BY number DESC LIMIT ?"
        with self._lock:
            return [job_of(row) for row in self._db.execute(query, (*values, limit))]

    def waiting(self, limit: int) -> list[Job]:
        """Waiting jobs in the order they will run."""
        query = f"SELECT {COLUMNS} FROM jobs WHERE state = 'queued' ORDER BY priority DESC, number LIMIT ?"
        with self._lock:
            return [job_of(row) for row in self._db.execute(query, (limit,))]

    def count(self, *states: State) -> int:
        """How many jobs are in these states; those that expired are not counted."""
        with self._lock:
            marks = ", ".join("?" * len(states))
            return int(
                self._db.execute(
                    f"SELECT count(*) FROM jobs WHERE expired = 0 AND state IN ({marks})", states
                ).fetchone()[0]
            )

    def position(self, job: Job) -> int | None:
        """How many jobs run before a waiting one."""
        if job.state != "queued":
            return None
        with self._lock:
            query = (
                "SELECT count(*) FROM jobs WHERE state = 'queued' AND (priority > ? OR (priority = ? AND number < ?))"
            )
            return int(self._db.execute(query, (job.priority, job.priority, job.number)).fetchone()[0])

    def events(self, job: str, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """The events of a job that follow number ``after``."""
        query = "SELECT number, type, data FROM events WHERE job = ? AND number > ? ORDER BY number LIMIT ?"
        with self._lock:
            rows = self._db.execute(query, (job, after, limit)).fetchall()
        return [StoredEvent(number, kind, json.loads(data)) for number, kind, data in rows]

    # running

    def claim(self) -> Job | None:
        """Start the next job and return it; None if none is waiting or the queue is paused."""
        with self._lock:
            if self.paused or (row := self._row("state = 'queued' ORDER BY priority DESC, number LIMIT 1")) is None:
                return None
            job = row[0]
            with self._transaction():
                change = "UPDATE jobs SET state = 'running', attempts = attempts + 1, started = ? WHERE id = ?"
                self._db.execute(change, (self._clock(), job.id))
                self._append(job.id, Event("started", {"attempt": job.attempts + 1}))
            return self.job(job.id)

    def append(self, job: str, event: Event) -> bool:
        """Record an event of a running job; False where the job is no longer running."""
        with self._lock:
            if (row := self._row("id = ?", job)) is None or row[0].state != "running":
                return False
            with self._transaction():
                self._append(job, event)
            return True

    def finish(
        self, job: str, state: State, *, result: dict[str, Any] | None = None, error: Failure | None = None
    ) -> bool:
        """End a running job; False where it has ended already."""
        data = result if result is not None else error.as_dict() if error is not None else {}
        with self._lock, self._transaction():
            changed = self._db.execute(
                "UPDATE jobs SET state = ?, finished = ?, result = ?, error = ?, bytes = bytes + ? + "
                "(SELECT coalesce(sum(length(data)), 0) FROM events WHERE job = jobs.id) WHERE id = ? AND state = 'running'",
                (state, self._clock(), json.dumps(result) if result is not None else None,
                 json.dumps(error.as_record()) if error is not None else None, self.files.result_bytes(job), job),
            )  # fmt: skip
            if changed.rowcount != 1:
                return False
            self._append(job, Event(state, data))
            return True

    def retry_or_fail(self, job: str, code: str, cause: str) -> State:
        """What becomes of a job whose process died: queued again the first time, failed the second."""
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

    def put_back(self, job: str) -> None:
        """Return a running job to the queue as if it had never been started: the worker is shutting down."""
        with self._lock, self._transaction():
            changed = self._db.execute(
                "UPDATE jobs SET state = 'queued', attempts = attempts - 1 WHERE id = ? AND state = 'running'", (job,)
            )
            if changed.rowcount == 1:
                self._append(job, Event("retried", {"code": "worker_stopped", "message": "the worker was shut down"}))

    def recover(self) -> None:
        """After a start: jobs that were running when the last process died, and files that belong to no job."""
        for job in self.jobs(states=("running",), limit=10_000):
            self.retry_or_fail(job.id, "worker_restarted", "the worker was killed while it ran this job")
        with self._lock:
            known = {row[0] for row in self._db.execute("SELECT id FROM jobs WHERE expired = 0")}
        self.files.remove_all_but(known)

    # control

    def cancel(self, job: str) -> Job:
        """End a waiting job, or ask for the end of a running one; `ConflictError` where it has ended."""
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
        """A new submission like a job that ended, with its inputs; training that was cut short is resumed."""
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
        with self._lock:
            row = self.job(job)
            if row.state != "queued":
                raise ConflictError(f"job {job} is {row.state}; only waiting jobs have a priority")
            with self._transaction():
                self._db.execute("UPDATE jobs SET priority = ? WHERE id = ?", (priority, job))
            return self.job(job)

    def move(self, job: str, position: int) -> Job:
        """Another place among the waiting jobs: 0 runs next, whatever the priorities were."""
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

    @property
    def paused(self) -> bool:
        with self._lock:
            row = self._db.execute("SELECT value FROM settings WHERE name = 'paused'").fetchone()
            return row is not None and row[0] == "1"

    def pause(self, paused: bool) -> None:
        """Waiting jobs wait on while the queue is paused, also over restarts; the running one goes on."""
        with self._lock, self._transaction():
            self._db.execute("INSERT OR REPLACE INTO settings VALUES ('paused', ?)", ("1" if paused else "0",))

    # retention

    def expire(self) -> int:
        """Forget what is too old or too much; returns how many jobs expired."""
        ended = f"state IN ({', '.join(repr(state) for state in FINAL)}) AND expired = 0"
        with self._lock:
            rows = self._db.execute(
                f"SELECT id, finished, bytes FROM jobs WHERE {ended} ORDER BY finished DESC"
            ).fetchall()
            limit, total, gone = self._clock() - self.keep_seconds, 0, []
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
        """Forget a job that ended."""
        with self._lock:
            if not self.job(job).final:
                raise ConflictError(f"job {job} has not ended; cancel it first")
            self._forget(job)

    def delete_image(self, job: str, name: str) -> None:
        """Remove one picture of a job that ended; without its last one the job is forgotten."""
        with self._lock:
            row = self.job(job)
            images = [image for image in (row.result or {}).get("images", ()) if image["file"] != name]
            if not row.final or row.result is None or len(images) == len(row.result.get("images", ())):
                raise MissingError(f"job {job} has no picture {name[:100]}")
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

    # database

    def _append(self, job: str, event: Event) -> None:
        self._db.execute(
            "INSERT INTO events SELECT ?, coalesce(max(number), 0) + 1, ?, ? FROM events WHERE job = ?",
            (job, event.type, json.dumps(event.data), job),
        )

    def _row(self, where: str, *values: object) -> tuple[Job, str] | None:
        row = self._db.execute(f"SELECT {COLUMNS}, fingerprint FROM jobs WHERE {where}", values).fetchone()
        return None if row is None else (job_of(row[:-1]), row[-1])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        if self._db.in_transaction:  # one transaction inside another is part of it
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # also where a full disk refused the COMMIT: it would swallow the next one
                self._db.execute("ROLLBACK")
            raise
