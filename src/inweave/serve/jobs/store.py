"""The queue on disk: jobs and their events in SQLite or PostgreSQL (`jobs.sql`), images in files next to it.

    jobs.sqlite3          one row per job, one row per event
    files/<job>/<name>    see `inweave.serve.jobs.files`; in a folder or an object store (`jobs.blobs`)

A submission survives the death of every process: it is committed and synchronized before any client gets its job id.
Each change of state is one transaction together with its event, and only happens from the expected state, so a job ends
exactly once even if several callers try to end it. Each process has a folder of its own; with PostgreSQL several
processes share the queue (`jobs.attempts`).

Retention: finished jobs are kept for ``keep_seconds`` and within ``keep_bytes``, the oldest expire first. The row of an
expired job says so, without events, request or files.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from inweave.errors import BusyError, ConflictError, MissingError
from inweave.serve.jobs.attempts import LEASE_SECONDS, JobAttempts
from inweave.serve.jobs.blobs import BlobStore, FolderBlobs
from inweave.serve.jobs.errors import DatabaseLost
from inweave.serve.jobs.files import JobFiles
from inweave.serve.jobs.job import FINAL, Event, Job, Submission, new_id
from inweave.serve.jobs.ordering import priorities_after_move
from inweave.serve.jobs.signals import WORK
from inweave.serve.jobs.sql import Database
from inweave.serve.jobs.training_runs import resumed_request

#: a file that tells the folders of queues apart
FOLDER_NAME = ".inweave-queue"
#: rows of expired jobs; beyond this number, the oldest are deleted
TOMBSTONES = 100_000


class JobStore(JobAttempts):
    """All jobs of a worker. Safe to call from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        queue_limit: int = 1000,
        keep_seconds: float = 24 * 3600,
        keep_bytes: int = 4 * 1024**3,
        clock: Callable[[], float] | None = None,
        database: Database | None = None,
        files: JobFiles | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        super().__init__(folder, clock=clock, database=database, files=files, lease_seconds=lease_seconds)
        self.queue_limit = queue_limit
        self.keep_seconds = keep_seconds
        self.keep_bytes = keep_bytes

    def ensure_same_folder(self, option: str, folder: Path) -> None:
        """See `ensure_same_store`."""
        if self.shared or folder.absolute() != self.folder.absolute():  # its own folder is locked
            self.ensure_same_store(option, FolderBlobs(folder))

    def ensure_same_store(self, option: str, blobs: BlobStore) -> None:
        """Raise ConflictError if other processes of this queue use another folder, or another queue uses this one.

        A file in it has a random name for the folder, and so has the database: paths may differ between machines. A
        queue removes files that belong to none of its jobs, so two queues in one folder would remove each other's.
        """
        name = f"folder:{option}"
        with self._transaction(queue=True):
            query = "SELECT name, value FROM settings WHERE name LIKE 'folder:' || ?"
            rows: dict[str, str] = dict(self._db.execute(query, "%").rows)
            here = None if (content := blobs.read(FOLDER_NAME)) is None else content.decode()
            if self.shared and name in rows:
                if rows[name] != here:
                    raise ConflictError(
                        f"{option} {blobs.label}: the workers of this queue use another folder; give all of "
                        "them the same one, and make sure that it is mounted"
                    )
                return
            if here is None:
                here = secrets.token_hex(16)
                blobs.write(FOLDER_NAME, here.encode())
            elif here not in rows.values():
                raise ConflictError(
                    f"{option} {blobs.label}: another queue uses this folder, and would lose its files; "
                    f"choose another one, or remove {FOLDER_NAME} from it if that queue does not exist any more"
                )
            # without a database that others share, the option may name another folder at the next start
            row = name if self.shared else f"{name}:{here}"
            self._db.execute("INSERT INTO settings VALUES (?, ?) ON CONFLICT (name) DO NOTHING", row, here)

    # submitting

    def submit(self, submission: Submission, admission: AbstractContextManager[None] | None = None) -> tuple[Job, bool]:
        """Return (the job, whether it is new); an idempotency key that was used before returns its job in any state.

        ``admission`` is entered while a new job is stored, which no other submission is meanwhile; it may raise.
        """
        if (known := self._known_or_room(submission)) is not None:  # before any file is written
            return known, False
        job = new_id()
        size = self.files.write_inputs(job, submission.inputs)
        try:
            with self._transaction(queue=True), contextlib.ExitStack() as stack:
                if (known := self._known_or_room(submission)) is None:
                    stack.enter_context(admission or contextlib.nullcontext())
                    self._db.execute(
                        "INSERT INTO jobs (id, kind, model, state, priority, client, request, created, bytes, "
                        "idempotency_key, fingerprint, account) VALUES (?, ?, ?, 'queued', ?, ?, ?, ?, ?, ?, ?, ?)",
                        job, submission.kind, submission.model, submission.priority, submission.client,
                        json.dumps(submission.request), self._clock(), size, submission.idempotency_key,
                        submission.fingerprint, submission.account,
                    )  # fmt: skip
                    self._append(job, Event("queued", {"kind": submission.kind, "model": submission.model}))
                    self._db.notify(WORK)
        except DatabaseLost:
            raise  # it may have been stored: `remove_lost_files` decides
        except BaseException:
            self.files.remove(job)
            raise
        if known is not None:
            self.files.remove(job)
            return known, False
        return self.job(job), True

    def _known_or_room(self, submission: Submission) -> Job | None:
        """Return the job of an idempotency key; raise BusyError if there is none and the queue is full."""
        key = submission.idempotency_key
        if key is not None and (known := self.submitted(key, submission.fingerprint)) is not None:
            return known
        if (waiting := self.count("queued")) >= self.queue_limit:
            raise BusyError(f"the queue is full: {waiting} jobs are waiting, {self.queue_limit} are allowed")
        return None

    # control

    def cancel(self, job: str) -> Job:
        """End a waiting job, or ask for the end of a running one; raise ConflictError if it is done or failed."""
        with self._transaction():
            row = self._locked(job)
            if row.state == "queued":
                change = "UPDATE jobs SET state = 'cancelled', cancel = 1, finished = ? WHERE id = ?"
                self._db.execute(change, self._clock(), job)
                self._append(job, Event("cancelled"))
            elif row.state == "running":
                self._db.execute("UPDATE jobs SET cancel = 1 WHERE id = ?", job)
                self._db.notify(job)
            elif row.state != "cancelled":
                raise ConflictError(f"job {job} has ended: {row.state}")
            return self.job(job)

    def _locked(self, job: str) -> Job:
        """Return a job that nothing else changes until the transaction ends; raise MissingError if there is none."""
        row = self._row(f"id = ?{self._db.for_update}", job)
        return self.job(job) if row is None else row[0]

    def retry(self, job: str) -> Submission:
        """Return a new submission like a finished job, with its inputs; interrupted training is resumed."""
        row = self.job(job)
        if row.expired:
            raise ConflictError(f"job {job} expired, and its request with it")
        if not row.final:
            raise ConflictError(f"job {job} is {row.state}")
        inputs = self.files.inputs(job)
        request = resumed_request(row) if row.kind == "train" else row.request
        return Submission(row.kind, row.model, request, inputs, row.priority, row.client)

    def prioritize(self, job: str, priority: int) -> Job:
        """Change the priority of a waiting job."""
        with self._transaction():
            row = self._locked(job)
            if row.state != "queued":
                raise ConflictError(f"job {job} is {row.state}; only waiting jobs have a priority")
            self._db.execute("UPDATE jobs SET priority = ? WHERE id = ?", priority, job)
            return self.job(job)

    def move(self, job: str, position: int) -> Job:
        """Move a job to another place among the waiting ones, regardless of their priorities; 0 runs next."""
        with self._transaction(queue=True):
            row = self._locked(job)
            if row.state != "queued":
                raise ConflictError(f"job {job} is {row.state}; only waiting jobs have a place in the queue")
            query = "SELECT id, number, priority FROM jobs WHERE state = 'queued' ORDER BY priority DESC, number"
            for name, priority in priorities_after_move(self._db.execute(query).rows, job, position).items():
                self._db.execute("UPDATE jobs SET priority = ? WHERE id = ?", priority, name)
            return self.job(job)

    def pause(self, paused: bool) -> None:
        """Hold waiting jobs back, also across restarts, or release them; the running job continues."""
        with self._transaction():
            self._db.execute(
                "INSERT INTO settings VALUES ('paused', ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                "1" if paused else "0",
            )  # fmt: skip
            self._db.notify(WORK)

    # retention

    def expire(self) -> int:
        """Forget jobs that exceed the limits of age and size; return how many expired."""
        ended = f"state IN ({', '.join(repr(state) for state in FINAL)}) AND expired = 0"
        rows = self._db.execute(f"SELECT id, finished, bytes FROM jobs WHERE {ended} ORDER BY number DESC").rows
        limit, total, gone = self._age_clock() - self.keep_seconds, 0, []
        for job, finished, size in rows:
            total += size
            if finished < limit or total > self.keep_bytes:
                gone.append(job)
        for job in gone:
            self._forget(job)
        self._db.execute(
            "DELETE FROM jobs WHERE expired = 1 AND number <= (SELECT max(number) FROM jobs) - ?", TOMBSTONES
        )
        return len(gone)

    def delete(self, job: str) -> None:
        """Forget a finished job."""
        if not self.job(job).final:
            raise ConflictError(f"job {job} has not ended; cancel it first")
        self._forget(job)

    def delete_image(self, job: str, name: str) -> None:
        """Remove one image of a finished job; the job is forgotten with its last image."""
        with self._transaction():
            row = self._locked(job)
            images = [image for image in (row.result or {}).get("images", ()) if image["file"] != name]
            if not row.final or row.result is None or len(images) == len(row.result.get("images", ())):
                raise MissingError(f"job {job} has no image {name[:100]}")
            result = json.dumps({**row.result, "images": images})
            self._db.execute("UPDATE jobs SET result = ? WHERE id = ?", result, job)
        if images:
            self.files.remove_result(job, name)
        else:
            self._forget(job)

    def _forget(self, job: str) -> None:
        with self._transaction():
            self._db.execute(
                "UPDATE jobs SET expired = 1, request = '{}', result = NULL, bytes = 0, client = '', account = '' "
                "WHERE id = ?", job,
            )  # fmt: skip
            self._db.execute("DELETE FROM events WHERE job = ?", job)
        self.files.remove(job)
