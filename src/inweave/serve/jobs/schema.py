"""The tables of the queue, and a row of them as a `Job`."""

from __future__ import annotations

import json
from typing import Any

from inweave.serve.jobs.job import Failure, Job

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
COLUMNS = (
    "id, number, kind, model, state, priority, client, request, attempts, cancel, created, started, finished, "
    "error, result, expired"
)
VERSION = 1


def job_of(row: tuple[Any, ...]) -> Job:
    """The job in a row of ``COLUMNS``."""
    (job, number, kind, model, state, priority, client, request, attempts, cancel, created, started, finished, error,
     result, expired) = row  # fmt: skip
    return Job(
        job, number, kind, model, state, priority, client, json.loads(request), attempts, bool(cancel), created, started,
        finished, Failure(**json.loads(error)) if error else None, json.loads(result) if result else None, bool(expired),
    )  # fmt: skip
