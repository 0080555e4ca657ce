"""Questions to the queue, which change nothing."""

from __future__ import annotations

import json
from typing import Any

from inweave.errors import ConflictError, MissingError
from inweave.serve.jobs.candidate import Candidate, candidate_of
from inweave.serve.jobs.database import COLUMNS, JobDatabase, job_of
from inweave.serve.jobs.job import Job, Kind, State, StoredEvent


class JobQueries(JobDatabase):
    """Jobs and their events, as they are stored."""

    def job(self, job: str) -> Job:
        """Return a job; raise MissingError if there is none with this id."""
        row = self._row("id = ?", job)
        if row is None:
            raise MissingError(f"there is no job {job}")
        return row[0]

    def jobs(
        self, *, states: tuple[State, ...] = (), kind: Kind | None = None, client: str | None = None,
        before: int | None = None, limit: int = 50,
    ) -> list[Job]:  # fmt: skip
        """Return jobs, the newest first; ``before`` is the number of the last job on the previous page."""
        where, values = ["expired = 0"], list[Any]()
        if states:
            where.append(f"state IN ({', '.join('?' * len(states))})")
            values += states
        if kind is not None:
            where.append("kind = ?")
            values.append(kind)
        if client is not None:
            where.append("client = ?")
            values.append(client)
        if before is not None:
            where.append("number < ?")
            values.append(before)
        query = f"SELECT {COLUMNS} FROM jobs WHERE {' AND '.join(where)} ORDER BY number DESC LIMIT ?"
        return [job_of(row) for row in self._db.execute(query, *values, limit).rows]

    def waiting(self, limit: int, client: str | None = None) -> list[Job]:
        """Return waiting jobs in the order in which they will run."""
        query = (
            f"SELECT {COLUMNS} FROM jobs WHERE state = 'queued' AND client = coalesce(?, client) "
            "ORDER BY priority DESC, number LIMIT ?"
        )
        return [job_of(row) for row in self._db.execute(query, client, limit).rows]

    def candidates(self, window: int) -> list[Candidate]:
        """Return the first waiting jobs by priority and age: ``window`` image jobs and as many train jobs."""
        query = (
            f"SELECT {COLUMNS} FROM jobs WHERE state = 'queued' AND (kind = 'train') = ? "
            "ORDER BY priority DESC, number LIMIT ?"
        )
        rows = [row for train in (False, True) for row in self._db.execute(query, train, window).rows]
        jobs = sorted(map(job_of, rows), key=lambda job: (-job.priority, job.number))
        return [candidate_of(job) for job in jobs]

    def waiting_ids(self) -> list[str]:
        """Return the ids of all waiting jobs in the order in which they will run."""
        query = "SELECT id FROM jobs WHERE state = 'queued' ORDER BY priority DESC, number"
        return [row[0] for row in self._db.execute(query).rows]

    def count(self, *states: State) -> int:
        """Return how many jobs are in these states, without those that expired."""
        marks = ", ".join("?" * len(states))
        query = f"SELECT count(*) FROM jobs WHERE expired = 0 AND state IN ({marks})"
        return int(self._db.execute(query, *states).value())

    def count_of(self, account: str) -> tuple[int, int]:
        """Return (how many jobs of an account wait, how many of its train jobs wait or run)."""
        query = (
            "SELECT coalesce(sum(CASE WHEN state = 'queued' THEN 1 ELSE 0 END), 0), "
            "coalesce(sum(CASE WHEN kind = 'train' THEN 1 ELSE 0 END), 0) "
            "FROM jobs WHERE state IN ('queued', 'running') AND account = ?"
        )
        waiting, training = self._db.execute(query, account).rows[0]
        return int(waiting), int(training)

    def position(self, job: Job) -> int | None:
        """Return how many jobs will run before a waiting one; None for any other job."""
        if job.state != "queued":
            return None
        query = "SELECT count(*) FROM jobs WHERE state = 'queued' AND (priority > ? OR (priority = ? AND number < ?))"
        return int(self._db.execute(query, job.priority, job.priority, job.number).value())

    def events(self, job: str, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """Return the events of a job that follow number ``after``."""
        query = "SELECT number, type, data FROM events WHERE job = ? AND number > ? ORDER BY number LIMIT ?"
        rows = self._db.execute(query, job, after, limit).rows
        return [StoredEvent(number, kind, json.loads(data)) for number, kind, data in rows]

    def last_event(self, job: str, *types: str) -> StoredEvent | None:
        """Return the newest event of these types."""
        marks = ", ".join("?" * len(types))
        query = (
            f"SELECT number, type, data FROM events WHERE job = ? AND type IN ({marks}) ORDER BY number DESC LIMIT 1"
        )
        row = self._db.execute(query, job, *types).first()
        return None if row is None else StoredEvent(row[0], row[1], json.loads(row[2]))

    def submitted(self, key: str, fingerprint: str) -> Job | None:
        """Return the job of an idempotency key; raise ConflictError if the key was used for another request."""
        known = self._row("idempotency_key = ?", key)
        if known is None:
            return None
        if known[1] != fingerprint:
            raise ConflictError("this idempotency key was used for another request")
        return known[0]

    @property
    def paused(self) -> bool:
        """Whether waiting jobs are held back."""
        row = self._db.execute("SELECT value FROM settings WHERE name = 'paused'").first()
        return row is not None and row[0] == "1"
