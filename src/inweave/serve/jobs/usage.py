"""What accounts have used, compared with their quotas before anything is queued or read.

    usage.sqlite3    used    amounts per account, quota and hour
                     open    jobs that have not ended, by account

    used(quota)  = the sum of the hours that began less than a day ago, for images and bytes
                 = the number of open jobs in the state that the quota counts, for jobs

Images are counted when their job is queued, bytes as they arrive. One process uses a file.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from inweave.errors import MissingError, Problem
from inweave.serve.jobs.accounts import GIBIBYTE, Account
from inweave.serve.jobs.errors import QuotaError
from inweave.serve.jobs.job import Job, Submission

HOUR, DAY = 3600, 24
#: when to try again after a refusal because of waiting jobs
RETRY_SECONDS = 5
UPLOADS = "upload_gb_per_day"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS used (
    account TEXT NOT NULL, quota TEXT NOT NULL, hour INTEGER NOT NULL, amount INTEGER NOT NULL,
    PRIMARY KEY (account, quota, hour)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS open (job TEXT PRIMARY KEY, account TEXT NOT NULL) WITHOUT ROWID;
"""


class Usage:
    """The usage of all accounts of a worker. Safe to call from several threads."""

    def __init__(
        self, folder: Path, find: Callable[[str], Job], refused: Callable[[str, str], None] = lambda *_: None,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """Open the file; ``find`` returns a job by its id, ``refused`` gets the account and the quota of a refusal."""
        self._find, self._refused, self._clock = find, refused, clock
        self._lock = threading.RLock()
        self._db = sqlite3.connect(folder / "usage.sqlite3", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)
        self._arriving: Counter[str] = Counter()  # bytes of bodies that are being read, by account

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    def used(self, account: Account) -> dict[str, int]:
        """Return what an account has used of each of its quotas."""
        with self._lock:
            return {quota: self._used(account, quota) for quota in account.quotas}

    @contextlib.contextmanager
    def queueing(self, account: Account | None, submission: Submission) -> Iterator[Callable[[Job, bool], None]]:
        """Raise QuotaError if a submission is beyond a quota; the function that is yielded counts the queued job.

        It takes the job, and whether it is new: a repeated submission is free.
        """
        if account is None:
            yield lambda job, new: None
            return
        train = submission.kind == "train"
        images = 0 if train else int(submission.request.get("config", {}).get("count") or 1)
        needs = {"queued_jobs": 1, "training_jobs": int(train), "images_per_day": images}

        def count(job: Job, new: bool) -> None:
            if new:
                self._db.execute("INSERT OR REPLACE INTO open VALUES (?, ?)", (job.id, account.name))
                self._add(account, "images_per_day", images)

        with self._lock:  # until the job is counted: two submissions at once are one after the other
            for quota, amount in needs.items():
                self._ensure(account, quota, amount)
            yield count

    def refusal(self, account: Account, size: int) -> QuotaError | None:
        """Return the error of a body that would be beyond the quota of uploads, by the length that it declares."""
        try:
            with self._lock:
                self._ensure(account, UPLOADS, size)
        except QuotaError as error:
            return error
        return None

    def arriving(self, account: Account, size: int) -> None:
        """Count bytes of a body that arrive; raise QuotaError once they are beyond the quota of uploads."""
        with self._lock:
            self._ensure(account, UPLOADS, size)
            self._arriving[account.name] += size

    def arrived(self, account: Account, size: int) -> None:
        """Store the count of a body that has arrived, or was cut off."""
        with self._lock:
            self._arriving[account.name] -= size
            self._add(account, UPLOADS, size)

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
            jobs = self._open(account)
            return sum(job.state == "queued" if quota == "queued_jobs" else job.kind == "train" for job in jobs)
        arriving = self._arriving[account.name] if quota == UPLOADS else 0
        return arriving + sum(amount for _, amount in self._hours(account, quota))

    def _open(self, account: Account) -> list[Job]:
        jobs = []
        for (name,) in self._db.execute("SELECT job FROM open WHERE account = ?", (account.name,)).fetchall():
            with contextlib.suppress(MissingError):
                job = self._find(name)
                if not job.final:
                    jobs.append(job)
                    continue
            self._db.execute("DELETE FROM open WHERE job = ?", (name,))
        return jobs

    def _hours(self, account: Account, quota: str) -> list[tuple[int, int]]:
        query = "SELECT hour, amount FROM used WHERE account = ? AND quota = ? AND hour > ? ORDER BY hour"
        return self._db.execute(query, (account.name, quota, self._hour() - DAY)).fetchall()

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

    def _add(self, account: Account, quota: str, amount: int) -> None:
        if amount and quota in account.quotas:
            self._db.execute("DELETE FROM used WHERE hour <= ?", (self._hour() - DAY,))
            self._db.execute(
                "INSERT INTO used VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET amount = amount + excluded.amount",
                (account.name, quota, self._hour(), amount),
            )

    def _hour(self) -> int:
        return int(self._clock() // HOUR)
