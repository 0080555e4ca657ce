"""Attempts: a job is claimed under a lease, and only the holder of the lease writes what becomes of it.

    claim          queued -> running, with a new random lease and the name of this web process as its holder
    write          events, results and ends of a running job are stored only under the lease of its row
    keep alive     every web process writes a new statement into ``processes``, the time of the database
    recover        a job whose holder has made no new statement for ``lease_seconds`` is queued again, or fails

A process that was stopped or cut off still has its old leases when it returns. Its rows have other ones by then, so
what it writes changes nothing. A process that could not reach the database itself waits a whole lease before it
judges others: they could not reach it either. How long a process has been silent is measured by the steady clock of the
one that judges it, so the clock of the database may jump.

The name of a process is in its data folder: after a restart it knows at once which jobs it was running. A copy of the
folder gets another name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inweave.errors import InweaveError
from inweave.serve.jobs.candidate import Candidate, candidate_of
from inweave.serve.jobs.errors import DatabaseLost
from inweave.serve.jobs.files import JobFiles
from inweave.serve.jobs.job import MAX_ATTEMPTS, Event, Failure, Job, State
from inweave.serve.jobs.queries import JobQueries
from inweave.serve.jobs.signals import WORK
from inweave.serve.jobs.sql import Database

log = logging.getLogger("inweave.serve")
LEASE_SECONDS = 30.0
#: processes that have said nothing for this long are forgotten
FORGET_SECONDS = 24 * 3600.0


class JobAttempts(JobQueries):
    """The jobs that this process runs, and those that other processes lost."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] | None = None,
        database: Database | None = None,
        files: JobFiles | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        super().__init__(folder, clock=clock, database=database, files=files)
        self.lease_seconds = lease_seconds
        self.name = _name_in(folder)
        self._leases: set[str] = set()
        self._latest: dict[str, str] = {}  # job -> the lease of its latest claim by this process
        self._connected: float | None = None  # since when the database has answered, on the monotonic clock
        self._alive: float = 0.0  # when this process last stated that it lives, likewise
        self._last_seen: dict[str, tuple[float, float]] = {}  # process -> (its last statement, when it was seen first)
        self._closing = threading.Event()
        self._beat: threading.Thread | None = None

    def close(self) -> None:
        """Close the database and release the folder."""
        self._closing.set()
        if self._beat is not None:
            self._beat.join()
        super().close()

    # running

    def claim(self, chosen: Callable[[list[Candidate]], str | None] | None = None, window: int = 1) -> Job | None:
        """Start a job and return it; None if none is waiting or the queue is paused.

        Args:
            chosen: returns the id of one of the first waiting jobs, or None for none now; default: the first one.
            window: how many image jobs and how many train jobs it may choose from.
        """
        if self.paused or not self.candidates(1):
            return None  # without the lock that all processes share
        lease = secrets.token_hex(8)
        self._leases.add(lease)  # before it is stored: `keep_alive` returns leases that nobody holds
        job = None
        try:
            with self._transaction(queue=True):
                candidates = [] if self.paused else self.candidates(window)
                choice = chosen(candidates) if candidates and chosen else candidates[0].id if candidates else None
                if choice is not None and self._start(choice, lease):
                    job = self.job(choice)
                    self._append(job.id, Event("started", {"attempt": job.attempts}))
        except BaseException:
            job = None
            raise
        finally:
            if job is None:
                self._leases.discard(lease)
            else:
                self._latest[job.id] = lease
        return job

    def _start(self, job: str, lease: str) -> bool:
        change = (
            "UPDATE jobs SET state = 'running', attempts = attempts + 1, started = ?, lease = ?, holder = ? "
            "WHERE id = ? AND state = 'queued'"
        )
        return self._db.execute(change, self._clock(), lease, self.name, job).changed == 1

    def running_elsewhere(self) -> list[Candidate]:
        """Return the jobs that other processes run."""
        if not self._db.shared:
            return []
        return [candidate_of(job) for job in self.jobs(states=("running",), limit=1000) if job.holder != self.name]

    def holds(self, job: str, lease: str | None = None) -> bool:
        """Return whether an attempt is still the one that counts; default: the latest one of this process."""
        return self._running(job, lease) is not None

    def _running(self, job: str, lease: str | None, lock: str = "") -> Job | None:
        lease = lease or self._latest.get(job)
        row = self._row(f"id = ? AND state = 'running' AND lease = ?{lock}", job, lease)
        if row is None and lease is not None:
            self._leases.discard(lease)
        return None if row is None else row[0]

    def append(self, job: str, event: Event, *, lease: str | None = None, again: bool = False) -> bool:
        """Record an event of a running job; return False if the attempt is over.

        ``again``: an earlier call may have stored it, although the connection was lost.
        """
        with self._transaction():
            if self._running(job, lease, self._db.for_update) is None:
                return False
            if not (again and self._ends_with(job, event)):
                self._append(job, event)
        return True

    def _ends_with(self, job: str, event: Event) -> bool:
        query = "SELECT type, data FROM events WHERE job = ? ORDER BY number DESC LIMIT 1"
        return self._db.execute(query, job).first() == (event.type, json.dumps(event.data))

    def finish(
        self, job: str, state: State, *, result: dict[str, Any] | None = None, error: Failure | None = None,
        lease: str | None = None,
    ) -> bool:  # fmt: skip
        """End a running job; return False if the attempt is over already."""
        size = self.files.result_bytes(job)
        with self._transaction():
            if (row := self._running(job, lease, self._db.for_update)) is None:
                return False
            self._end(row, state, size, result, error)
        self._release(row)
        return True

    def _end(
        self, job: Job, state: State, size: int, result: dict[str, Any] | None = None, error: Failure | None = None
    ) -> None:
        self._db.execute(
            "UPDATE jobs SET state = ?, finished = ?, result = ?, error = ?, lease = NULL, bytes = bytes + ? + "
            "(SELECT coalesce(sum(length(data)), 0) FROM events WHERE job = jobs.id) WHERE id = ?",
            state, self._clock(), json.dumps(result) if result is not None else None,
            json.dumps(error.as_record()) if error is not None else None, size, job.id,
        )  # fmt: skip
        data = result if result is not None else error.as_dict() if error is not None else {}
        self._append(job.id, Event(state, data))

    def _release(self, job: Job) -> None:
        if job.lease is not None:
            self._leases.discard(job.lease)

    def retry_or_fail(self, job: str, code: str, cause: str, *, lease: str | None = None) -> State:
        """Queue a job whose process died again, or fail it if that happened before; return its new state."""
        size = self.files.result_bytes(job)
        with self._transaction():
            known = self._row(f"id = ?{self._db.for_update}", job)
            row = self.job(job) if known is None else known[0]
            if row.state != "running" or row.lease != (lease or self._latest.get(job)):
                return row.state
            state: State = "queued"
            if row.cancel:
                state = "cancelled"
                self._end(row, state, size)
            elif row.attempts >= MAX_ATTEMPTS:
                state = "failed"
                self._end(row, state, size, error=Failure(code, f"{cause}, {MAX_ATTEMPTS} times"))
            else:
                self._requeue(row, row.attempts, {"code": code, "message": f"{cause}; it is run once more"})
        self._release(row)
        return state

    def put_back(
        self, job: str, code: str = "worker_stopped", message: str = "the worker was shut down", *,
        lease: str | None = None,
    ) -> None:  # fmt: skip
        """Return a running job to the queue as if it had never been started: it is not to blame."""
        with self._transaction():
            if (row := self._running(job, lease, self._db.for_update)) is None:
                return
            self._requeue(row, row.attempts - 1, {"code": code, "message": message})
        self._release(row)

    def _requeue(self, job: Job, attempts: int, reason: dict[str, Any]) -> None:
        change = "UPDATE jobs SET state = 'queued', lease = NULL, holder = NULL, attempts = ? WHERE id = ?"
        self._db.execute(change, attempts, job.id)
        self._append(job.id, Event("retried", reason))
        self._db.notify(WORK)

    # leases

    def recover(self) -> None:
        """Requeue or fail the jobs that this process was running when it died, and remove files without a job."""
        for job in self.jobs(states=("running",), limit=10_000):
            if job.lease not in self._leases and (job.holder == self.name or not self._db.shared):
                cause = "the worker was killed while it ran this job"
                self.retry_or_fail(job.id, "worker_restarted", cause, lease=job.lease)
        if not self._db.shared:
            self.remove_lost_files()

    def remove_lost_files(self, older_than: float = 0.0) -> None:
        """Remove the files of jobs that do not exist; ``older_than``: seconds since they were written."""
        known = {row[0] for row in self._db.execute("SELECT id FROM jobs WHERE expired = 0").rows}
        self.files.remove_all_but(known, older_than)

    def keep_alive(self) -> None:
        """State that this process lives, and recover the jobs of those that do not; raise DatabaseLost."""
        now, time_here = self._db.now(), time.monotonic()
        if now is None:
            return  # this process is the only one
        self._db.execute(
            "INSERT INTO processes VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET alive = excluded.alive", self.name, now
        )
        if self._connected is None or time_here - self._alive > self.lease_seconds:
            self._connected = time_here
            self._last_seen.clear()
        self._alive = time.monotonic()
        statements: dict[str, float] = dict(self._db.execute("SELECT id, alive FROM processes").rows)
        self._last_seen = {
            name: known if (known := self._last_seen.get(name)) and known[0] == statement else (statement, time_here)
            for name, statement in statements.items()
        }
        alive = {name for name, (_, since) in self._last_seen.items() if time_here - since < self.lease_seconds}
        for job in self.jobs(states=("running",), limit=10_000):
            if job.holder == self.name:
                if job.lease not in self._leases:  # a claim whose answer was lost
                    self.put_back(job.id, "claim_lost", "the connection to the database was lost", lease=job.lease)
            elif job.holder not in alive and time_here - self._connected >= self.lease_seconds:
                cause = f"the web process that ran it has not answered for {self.lease_seconds:g} s"
                log.warning("%s: %s", job.id, cause)
                self.retry_or_fail(job.id, "worker_lost", cause, lease=job.lease)
        for name, (_, since) in self._last_seen.items():
            if time_here - since > max(FORGET_SECONDS, self.lease_seconds):
                self._db.execute("DELETE FROM processes WHERE id = ?", name)

    def begin_to_keep_alive(self) -> None:
        """Call `keep_alive` three times per lease, in a thread, until the store is closed."""
        if not self._db.shared:
            return

        def beat() -> None:
            while not self._closing.is_set():
                try:
                    self.keep_alive()
                except DatabaseLost as error:
                    log.error("the database does not answer: %s", error.reason)
                except (InweaveError, OSError):
                    log.exception("this process could not state that it is alive")
                self._closing.wait(self.lease_seconds / 3)

        self._beat = threading.Thread(target=beat, name="inweave-alive", daemon=True)
        self._beat.start()

    def listen(self, receive: Callable[[str], None]) -> None:
        """Call ``receive`` with the id of every job that changes in another process, with WORK, and with ""."""
        self._db.listen(receive)

    def announce(self, text: str) -> None:
        """Send a signal to every process that listens; without a database that answers, they notice later."""
        with contextlib.suppress(DatabaseLost):
            self._db.notify(text)

    def take_turn(self, work: str, seconds: float) -> bool:
        """Return whether this process does a periodic work that one of them does every ``seconds``."""
        if (now := self._db.now()) is None:
            return True
        change = (
            "INSERT INTO settings VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value "
            "WHERE CAST(settings.value AS DOUBLE PRECISION) NOT BETWEEN ? AND ?"  # later than now: the clock went back
        )
        return self._db.execute(change, f"turn:{work}", repr(now), now - seconds, now).changed == 1


def _name_in(folder: Path) -> str:
    """Return the name of the process that owns a folder; it stays the same over restarts.

    The file holds the name and its own inode: a copy of the folder, which may be used beside it, has another one.
    """
    path = folder / "process"
    with contextlib.suppress(FileNotFoundError):
        name, _, inode = path.read_text().strip().partition(" ")
        if name and inode in ("", str(path.stat().st_ino)):  # earlier versions wrote the name alone
            return name
        path.unlink()
    name = f"process-{secrets.token_hex(8)}"
    with path.open("x") as file:
        file.write(f"{name} {os.fstat(file.fileno()).st_ino}\n")
    return name
