"""Albums of the gallery: names, one set per account, and which images are in them.

An image is in any number of albums. Deleting an album leaves its images; an image in the trash is not counted.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from inweave.errors import ConflictError, MissingError
from inweave.serve.jobs.sql import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS albums (
    id TEXT PRIMARY KEY, account TEXT NOT NULL, folder TEXT NOT NULL, name TEXT NOT NULL,
    created DOUBLE PRECISION NOT NULL, UNIQUE (folder, account, name)
);
CREATE TABLE IF NOT EXISTS album_images (
    album TEXT NOT NULL, image TEXT NOT NULL, PRIMARY KEY (album, image)
);
"""


class Albums:
    """The albums of one folder; ``folder``: its random name. Safe to call from several threads."""

    def __init__(self, database: Database, folder: str) -> None:
        self._db, self._folder = database, folder

    def list(self, account: str) -> list[dict[str, Any]]:
        """Return the albums of an account by name, with the number of their images and the id of the newest one."""
        query = (
            "SELECT albums.id, albums.name, albums.created, count(gallery.id), max(gallery.number) FROM albums "
            "LEFT JOIN album_images ON album_images.album = albums.id "
            "LEFT JOIN gallery ON gallery.id = album_images.image AND gallery.state = 'present' "
            "WHERE albums.folder = ? AND albums.account = ? GROUP BY albums.id, albums.name, albums.created"
        )
        rows = self._db.execute(query, self._folder, account).rows
        numbers = [row[4] for row in rows if row[4] is not None]
        marks = ", ".join("?" * len(numbers))
        query = f"SELECT number, id FROM gallery WHERE number IN ({marks})"
        covers = {row[0]: row[1] for row in self._db.execute(query, *numbers).rows} if numbers else {}
        return [
            {"id": album, "name": name, "created": created, "images": int(count), "cover": covers.get(newest)}
            for album, name, created, count, newest in sorted(rows, key=lambda row: (row[1].lower(), row[0]))
        ]

    def create(self, account: str, name: str) -> str:
        """Return the id of a new album; raise ConflictError if another one has its name."""
        album = f"album-{secrets.token_hex(8)}"
        query = "INSERT INTO albums VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
        if self._db.execute(query, album, account, self._folder, name, time.time()).changed != 1:
            raise ConflictError(f"an album is already called {name[:100]!r}")
        return album

    def rename(self, account: str, album: str, name: str) -> None:
        """Change the name of an album; raise ConflictError if another one has it."""
        self.ensure(account, album)
        with self._db.transaction(queue=True):
            query = "SELECT id FROM albums WHERE folder = ? AND account = ? AND name = ?"
            row = self._db.execute(query, self._folder, account, name).first()
            if row is not None and row[0] != album:
                raise ConflictError(f"an album is already called {name[:100]!r}")
            self._db.execute("UPDATE albums SET name = ? WHERE id = ?", name, album)

    def ensure(self, account: str, album: str) -> None:
        """Raise MissingError unless an account has an album of this id."""
        query = "SELECT 1 FROM albums WHERE id = ? AND folder = ? AND account = ?"
        if self._db.execute(query, album, self._folder, account).first() is None:
            raise MissingError(f"there is no album {album[:100]}")

    def remove(self, account: str, album: str) -> None:
        """Forget an album; its images stay."""
        self.ensure(account, album)
        with self._db.transaction():
            self._db.execute("DELETE FROM album_images WHERE album = ?", album)
            self._db.execute("DELETE FROM albums WHERE id = ?", album)

    def put(self, account: str, album: str, images: Sequence[str], present: bool) -> int:
        """Put images into an album, or take them out; return how many of them the account has."""
        self.ensure(account, album)
        marks = ", ".join("?" * len(images))
        query = f"SELECT id FROM gallery WHERE folder = ? AND account = ? AND id IN ({marks})"
        change = "DELETE FROM album_images WHERE album = ? AND image = ?"
        if present:
            change = "INSERT INTO album_images VALUES (?, ?) ON CONFLICT DO NOTHING"
        with self._db.transaction():
            ids = [row[0] for row in self._db.execute(query, self._folder, account, *images).rows]
            for image in ids:
                self._db.execute(change, album, image)
        return len(ids)

    def images(self) -> set[str]:
        """Return the ids of all images that are in an album."""
        return {row[0] for row in self._db.execute("SELECT DISTINCT image FROM album_images").rows}
