"""Images that clients send once and name in many jobs.

    uploads.sqlite3      one row per upload: its size, when it was last used, whether it has expired
    uploads/<id>.png     the image, as the sandbox has encoded it

An upload is kept for ``keep_seconds`` after its last use, among the ``max_count`` that were used last, within
``max_bytes``. Afterwards its row says that it expired, so that its id answers 410 and not 404. A job copies the uploads
it names and does not depend on them afterwards. With PostgreSQL the rows are there, and several processes share them.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inweave.errors import MissingError, RequestError
from inweave.serve.jobs.blobs import BlobStore, FolderBlobs
from inweave.serve.jobs.clock import AgeClock
from inweave.serve.jobs.errors import GoneError
from inweave.serve.jobs.image_request import png_size
from inweave.serve.jobs.sql import Database, SqliteDatabase

PREFIX = "upload-"  # base64 has no dash, so an id is never mistaken for an image
#: rows of expired uploads; beyond this number, the oldest are deleted
TOMBSTONES = 10_000
_ID = re.compile(rf"{PREFIX}[0-9a-f]{{24}}")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS uploads (
    number {number},
    id TEXT NOT NULL UNIQUE,
    width BIGINT NOT NULL,
    height BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    created DOUBLE PRECISION NOT NULL,
    used DOUBLE PRECISION NOT NULL,
    expired BIGINT NOT NULL DEFAULT 0
);
"""
VERSION = 1
#: files without a row may be those of an upload that another process is about to store
LOST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Upload:
    """An image that jobs may name by its id."""

    id: str
    width: int
    height: int
    bytes: int
    created: float
    expires: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id, "width": self.width, "height": self.height, "bytes": self.bytes, "created": self.created,
            "expires": self.expires, "url": f"/v1/uploads/{self.id}", "file": f"/v1/uploads/{self.id}/file",
        }  # fmt: skip


class UploadStore:
    """The uploads of a worker; ``folder`` is its data folder. Safe to call from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        keep_seconds: float,
        max_count: int,
        max_bytes: int,
        clock: Callable[[], float] | None = None,
        files: BlobStore | None = None,
        database: Database | None = None,
    ) -> None:
        self._files = files or FolderBlobs(folder / "uploads")
        self._keep_seconds, self._max_count, self._max_bytes = keep_seconds, max_count, max_bytes
        self._clock, self._age_clock = clock or time.time, clock or AgeClock()
        self._db = database or SqliteDatabase(folder / "uploads.sqlite3")
        self._db.prepare("uploads", VERSION, _SCHEMA, {})
        if not self._db.shared:
            self._remove_lost_files(0.0)

    def _remove_lost_files(self, older_than: float) -> None:
        """Remove the files of a process that died before it wrote their row."""
        known = {f"{name}.png" for (name,) in self._db.execute("SELECT id FROM uploads WHERE expired = 0").rows}
        for name, age in self._files.ages().items():
            if name not in known and age >= older_than:
                self._files.remove(name)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def add(self, png: bytes) -> Upload:
        """Store an image from the sandbox; the ones used longest ago make room."""
        if len(png) > self._max_bytes:
            raise RequestError(f"the image takes {len(png):,} bytes; all uploads together may take {self._max_bytes:,}")
        name = f"{PREFIX}{secrets.token_hex(12)}"
        width, height = png_size(png)
        self._files.write(_file(name), png)
        try:
            with self._db.transaction(queue=True):
                now = self._now()
                self._db.execute(
                    "INSERT INTO uploads (id, width, height, bytes, created, used) VALUES (?, ?, ?, ?, ?, ?)",
                    name, width, height, len(png), now, now,
                )  # fmt: skip
        except BaseException:
            self._files.remove(_file(name))
            raise
        self._expire()
        return self._find(name)

    def find(self, name: str) -> Upload:
        """Return the upload of an id; raise MissingError if it never existed, GoneError if it expired."""
        return self._find(name)

    def read(self, name: str) -> bytes:
        """Return the image as PNG and restart its time."""
        self._find(name)
        with self._db.transaction(queue=True):
            self._db.execute("UPDATE uploads SET used = ? WHERE id = ?", self._now(), name)
        content = self._files.read(_file(name))
        if content is None:
            self._forget(name)
            raise GoneError(f"upload {name} has expired; send the image again")
        return content

    def remove(self, name: str) -> None:
        """Expire an upload now."""
        self._find(name)
        self._forget(name)

    def expire(self) -> None:
        """Expire uploads that exceed the limits of age, number and size."""
        self._expire()
        self._remove_lost_files(LOST_SECONDS)

    def _now(self) -> float:
        """Return the time of a use: later than every other, also after the system's clock went back."""
        latest = self._db.execute("SELECT max(used) FROM uploads WHERE expired = 0").value()
        return max(self._clock(), (latest or 0.0) + 1e-3)

    def _expire(self) -> None:
        query = "SELECT id, used, bytes FROM uploads WHERE expired = 0 ORDER BY used DESC, number DESC"
        limit, total = self._age_clock() - self._keep_seconds, 0
        for place, (name, used, size) in enumerate(self._db.execute(query).rows):
            total += size
            if used < limit or total > self._max_bytes or place >= self._max_count:
                self._forget(name)
        self._db.execute(
            "DELETE FROM uploads WHERE expired = 1 AND number <= (SELECT max(number) FROM uploads) - ?", TOMBSTONES
        )

    def _forget(self, name: str) -> None:
        self._db.execute("UPDATE uploads SET expired = 1, bytes = 0 WHERE id = ?", name)
        self._files.remove(_file(name))

    def _find(self, name: str) -> Upload:
        row = None
        if _ID.fullmatch(name):
            query = "SELECT id, width, height, bytes, created, used, expired FROM uploads WHERE id = ?"
            row = self._db.execute(query, name).first()
        if row is None:
            raise MissingError(f"there is no upload {name[:100]}; upload the image first")
        _, width, height, size, created, used, expired = row
        if expired or used < self._age_clock() - self._keep_seconds:
            raise GoneError(f"upload {name} has expired; send the image again")
        return Upload(name, width, height, size, created, used + self._keep_seconds)


def _file(name: str) -> str:
    return f"{name}.png"
