"""What accounts have used, compared with their quotas before anything is queued or read.

    used(quota)  = the sum of the hours that began less than a day ago, for images and bytes
                 = the number of jobs in the states that the quota counts, for jobs

Images are counted when their job is queued. Bytes of a body are reserved before they are read: the length that it
declares, or block by block, and what does not arrive is given back. A process that is killed gives nothing back.

With PostgreSQL the table is there, and all workers of the queue count in it; otherwise it is in usage.sqlite3.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from inweave.errors import Problem
from inweave.serve.jobs.accounts import GIBIBYTE, Account
from inweave.serve.jobs.errors import QuotaError
from inweave.serve.jobs.job import Submission
from inweave.serve.jobs.sql import Database, SqliteDatabase

HOUR, DAY = 3600, 24
#: when to try again after a refusal because of waiting jobs
RETRY_SECONDS = 5
UPLOADS = "upload_gb_per_day"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS used (
    account TEXT NOT NULL, quota TEXT NOT NULL, hour BIGINT NOT NULL, amount BIGINT NOT NULL,
    PRIMARY KEY (account, quota, hour)
){one_tree};
"""
VERSION = 1


class Usage:
    """The usage of all accounts of a queue. Safe to call from several threads."""

    def __init__(
        self, folder: Path, count_of: Callable[[str], tuple[int, int]],
        refused: Callable[[str, str], None] = lambda *_: None, clock: Callable[[], float] = time.time,
        database: Database | None = None,
    ) -> None:  # fmt: skip
        """Open the table.

        Args:
            folder: of the file, without a database.
            count_of: returns how many jobs of an account wait, and how many of its train jobs wait or run.
            refused: gets the account and the quota of every refusal.
            clock: the time in seconds.
            database: of the queue, if several workers share it.
        """
        self._count_of, self._refused, self._clock = count_of, refused, clock
        self._db = database or SqliteDatabase(folder / "usage.sqlite3")
        self._db.prepare("usage", VERSION, _SCHEMA, {})

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def used(self, account: Account) -> dict[str, int]:
        """Return what an account has used of each of its quotas."""
        return {quota: self._used(account, quota) for quota in account.quotas}

    @contextlib.contextmanager
    def admission(self, account: Account, submission: Submission) -> Iterator[None]:
        """Raise QuotaError if a submission is beyond a quota; count it once it is stored (see `JobStore.submit`)."""
        train = submission.kind == "train"
        images = 0 if train else int(submission.request.get("config", {}).get("count") or 1)
        for quota, amount in {"queued_jobs": 1, "training_jobs": int(train), "images_per_day": images}.items():
            self._ensure(account, quota, amount)
        yield
        self._add(account, "images_per_day", images, self._hour())

    def reserve(self, account: Account, needed: int, wish: int = 0) -> tuple[int, int]:
        """Count bytes of a body that will be read: as many as are needed, or as are wished for if there is room.

        Returns:
            (how many were counted, in which hour).

        Raises:
            QuotaError: those needed are beyond the quota of uploads.
        """
        with self._db.transaction(queue=True):  # two bodies at once, at any worker, are one after the other
            self._ensure(account, UPLOADS, needed)
            room = account.quotas[UPLOADS] - self._used(account, UPLOADS)
            size = max(needed, min(wish, room))
            hour = self._hour()
            self._add(account, UPLOADS, size, hour)
        return size, hour

    def give_back(self, account: Account, size: int, hour: int) -> None:
        """Count bytes no longer that did not arrive; ``hour``: in which they were reserved."""
        with self._db.transaction(queue=True):
            self._add(account, UPLOADS, -size, hour)

    def _ensure(self, account: Account, quota: str, amount: int) -> None:
        limit = account.quotas.get(quota)
        if limit is None or not amount or (used := self._used(account, quota)) + amount <= limit:
            return
        self._refused(account.name, quota)
        if quota == UPLOADS:
            text = f"{used / GIBIBYTE:.3g} of {limit / GIBIBYTE:g} GiB of uploads of a day are used"
        else:
            text = f"{used:,} of {limit:,} are used, and this takes {amount:,} more"
        raise QuotaError(Problem(quota, f"{text}; account {account.name}"), self._free_after(account, quota, amount))

    def _used(self, account: Account, quota: str) -> int:
        if quota in ("queued_jobs", "training_jobs"):
            return self._count_of(account.name)[quota == "training_jobs"]
        return sum(amount for _, amount in self._hours(account, quota))

    def _hours(self, account: Account, quota: str) -> list[tuple[int, int]]:
        query = "SELECT hour, amount FROM used WHERE account = ? AND quota = ? AND hour > ? ORDER BY hour"
        rows = self._db.execute(query, account.name, quota, self._hour() - DAY).rows
        return [(hour, amount) for hour, amount in rows]

    def _free_after(self, account: Account, quota: str, amount: int) -> int:
        """Return the seconds until so much of a quota is free again that an amount has room."""
        if quota in ("queued_jobs", "training_jobs"):
            return RETRY_SECONDS
        excess = self._used(account, quota) + amount - account.quotas[quota]
        for hour, used in self._hours(account, quota):
            excess -= used
            if excess <= 0:
                return max(1, int((hour + DAY) * HOUR - self._clock()) + 1)
        return DAY * HOUR

    def _add(self, account: Account, quota: str, amount: int, hour: int) -> None:
        if amount and quota in account.quotas:
            self._db.execute("DELETE FROM used WHERE hour <= ?", self._hour() - DAY)
            self._db.execute(
                "INSERT INTO used VALUES (?, ?, ?, ?) "
                "ON CONFLICT (account, quota, hour) DO UPDATE SET amount = used.amount + excluded.amount",
                account.name, quota, hour, amount,
            )  # fmt: skip

    def _hour(self) -> int:
        return int(self._clock() // HOUR)
