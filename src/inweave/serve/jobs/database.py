"""The tables of the queue, rows as `Job`, and which database holds them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any

from inweave.serve.jobs.blobs import FolderBlobs
from inweave.serve.jobs.clock import AgeClock
from inweave.serve.jobs.files import JobFiles, own_folder
from inweave.serve.jobs.job import Event, Failure, Job
from inweave.serve.jobs.sql import Database, Row, SqliteDatabase

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number {number},
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    model TEXT NOT NULL,
    state TEXT NOT NULL,
    priority BIGINT NOT NULL,
    client TEXT NOT NULL,
    request TEXT NOT NULL,
    attempts BIGINT NOT NULL DEFAULT 0,
    cancel BIGINT NOT NULL DEFAULT 0,
    created DOUBLE PRECISION NOT NULL,
    started DOUBLE PRECISION,
    finished DOUBLE PRECISION,
    error TEXT,
    result TEXT,
    bytes BIGINT NOT NULL DEFAULT 0,
    expired BIGINT NOT NULL DEFAULT 0,
    idempotency_key TEXT UNIQUE,
    fingerprint TEXT NOT NULL DEFAULT '',
    lease TEXT,
    holder TEXT,
    account TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, priority DESC, number);
CREATE TABLE IF NOT EXISTS events (
    job TEXT NOT NULL,
    number BIGINT NOT NULL,
    type TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (job, number)
){one_tree};
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS processes (id TEXT PRIMARY KEY, alive DOUBLE PRECISION NOT NULL);
"""
VERSION = 3
#: layout -> how it becomes the next one
CHANGES = {
    1: ("ALTER TABLE jobs ADD COLUMN lease TEXT", "ALTER TABLE jobs ADD COLUMN holder TEXT"),
    2: ("ALTER TABLE jobs ADD COLUMN account TEXT NOT NULL DEFAULT ''",),
}
_FIELDS = tuple(field.name for field in fields(Job))
COLUMNS = ", ".join(_FIELDS)


class JobDatabase:
    """The database in a folder that one process owns, or ``database``. Safe to call from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] | None = None,
        database: Database | None = None,
        files: JobFiles | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.files = files or JobFiles(FolderBlobs(folder / "files"))
        #: for stamps, and for ages; one that is given is used for both
        self._clock, self._age_clock = clock or time.time, clock or AgeClock()
        self._ownership = own_folder(folder)
        self._db = database or SqliteDatabase(folder / "jobs.sqlite3")
        self._db.prepare("jobs", VERSION, SCHEMA, CHANGES)

    @property
    def shared(self) -> bool:
        """Whether other processes use the same queue."""
        return self._db.shared

    def close(self) -> None:
        """Close the database and release the folder."""
        self._db.close()
        self._ownership.close()

    def _transaction(self, *, queue: bool = False) -> AbstractContextManager[None]:
        return self._db.transaction(queue=queue)

    def _append(self, job: str, event: Event) -> None:
        self._db.execute(
            "INSERT INTO events SELECT ?, coalesce(max(number), 0) + 1, ?, ? FROM events WHERE job = ?",
            job, event.type, json.dumps(event.data), job,
        )  # fmt: skip
        self._db.notify(job)

    def _row(self, where: str, *values: object) -> tuple[Job, str] | None:
        row = self._db.execute(f"SELECT {COLUMNS}, fingerprint FROM jobs WHERE {where}", *values).first()
        return None if row is None else (job_of(row[:-1]), row[-1])


def job_of(row: Row) -> Job:
    """Return the job in a row of ``COLUMNS``."""
    values: dict[str, Any] = dict(zip(_FIELDS, row, strict=True))
    for name in ("request", "error", "result"):
        values[name] = json.loads(values[name]) if values[name] else None
    values["error"] = Failure(**values["error"]) if values["error"] else None
    return Job(**values | {name: bool(values[name]) for name in ("cancel", "expired")})
