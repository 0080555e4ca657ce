"""The database of the queue: its tables, its transactions, and rows as `Job`."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from inweave.errors import ConflictError
from inweave.serve.jobs.clock import AgeClock
from inweave.serve.jobs.files import JobFiles, own_folder
from inweave.serve.jobs.job import Event, Failure, Job

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    model TEXT NOT NULL,
    state TEXT NOT NULL,
    priority INTEGER NOT NULL,
    client TEXT NOT NULL,
    request TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    cancel INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    started REAL,
    finished REAL,
    error TEXT,
    result TEXT,
    bytes INTEGER NOT NULL DEFAULT 0,
    expired INTEGER NOT NULL DEFAULT 0,
    idempotency_key TEXT UNIQUE,
    fingerprint TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, priority DESC, number);
CREATE TABLE IF NOT EXISTS events (
    job TEXT NOT NULL,
    number INTEGER NOT NULL,
    type TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (job, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_FIELDS = tuple(field.name for field in fields(Job))
COLUMNS = ", ".join(_FIELDS)
VERSION = 1


class JobDatabase:
    """The database in a folder that one process owns. Safe to call from several threads."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.files = JobFiles(folder / "files")
        #: for stamps, and for ages; one that is given is used for both
        self._clock, self._age_clock = clock or time.time, clock or AgeClock()
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
        """Close the database and release the folder."""
        with self._lock:
            self._db.close()
            self._ownership.close()

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
            if (
                self._db.in_transaction
            ):  # also after a full disk refused the COMMIT: the open transaction would swallow the next one
                self._db.execute("ROLLBACK")
            raise


def job_of(row: tuple[Any, ...]) -> Job:
    """Return the job in a row of ``COLUMNS``."""
    values: dict[str, Any] = dict(zip(_FIELDS, row, strict=True))
    for name in ("request", "error", "result"):
        values[name] = json.loads(values[name]) if values[name] else None
    values["error"] = Failure(**values["error"]) if values["error"] else None
    return Job(**values | {name: bool(values[name]) for name in ("cancel", "expired")})
