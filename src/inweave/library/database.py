"""The tables of the library, and rows as entries.

files     one row per file. Rows of files that are gone (present = 0) keep their id and hash: the file may come back
          under another name. A row whose path was taken by another file has no place (root = '').
former    ids that files had until their hash identified them
reading   which process reads which file now
deaths    files whose reading crashed a process once
"""

from __future__ import annotations

import json
import sqlite3
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, FormatError, MissingError
from inweave.files.paths import printable_path
from inweave.library.entry import Contents, LibraryEntry, LibraryFacts
from inweave.library.walk import is_unicode

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY,
    root TEXT NOT NULL,
    path TEXT NOT NULL,
    name TEXT NOT NULL,
    alias TEXT,
    size INTEGER NOT NULL,
    modified_ns INTEGER NOT NULL,
    inode INTEGER NOT NULL,
    stamp TEXT NOT NULL,
    base TEXT,
    facts TEXT NOT NULL,
    contents TEXT,
    sha256 TEXT,
    autov1 TEXT,
    autov2 TEXT,
    autov3 TEXT,
    present INTEGER NOT NULL DEFAULT 1,
    sample TEXT,
    UNIQUE (root, path)
);
CREATE INDEX IF NOT EXISTS files_by_name ON files (name);
CREATE INDEX IF NOT EXISTS files_by_sha256 ON files (sha256);
CREATE INDEX IF NOT EXISTS files_by_autov3 ON files (autov3);
CREATE INDEX IF NOT EXISTS files_by_inode ON files (inode);
CREATE TABLE IF NOT EXISTS former (former TEXT PRIMARY KEY, id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS reading (root TEXT, path TEXT, stamp TEXT, size INTEGER, process TEXT);
CREATE TABLE IF NOT EXISTS deaths (root TEXT, path TEXT, stamp TEXT, UNIQUE (root, path));
"""
_VERSION = 3
_COLUMNS = "id, root, path, size, modified_ns, facts, contents"


class Database:
    """The index in a file, open for some folders. Safe for threads; several processes may use one file."""

    def __init__(self, database: Path, folders: Sequence[Path]) -> None:
        missing = [folder for folder in folders if not folder.is_dir()]
        if missing:
            raise MissingError(f"{printable_path(missing[0])}: no such folder")
        self.folders = [folder.resolve() for folder in folders]
        for folder in self.folders:
            if not is_unicode(str(folder)):
                raise ConfigError(
                    f"{ascii(str(folder))[1:-1]}: the path of a library must be Unicode; rename the folder"
                )
        self._lock = threading.RLock()
        try:
            database.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(database, isolation_level=None, check_same_thread=False, timeout=30)
            for name, function in (("fold", folded), ("composed", composed), ("trigger_words", trigger_words)):
                self._db.create_function(name, 1, function, deterministic=True)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")  # lost changes are found again by the next scan
            self._create_tables()
        except sqlite3.OperationalError as error:
            raise ConfigError(f"{printable_path(database)}: the index cannot be written ({error})") from None
        except sqlite3.DatabaseError as error:
            raise FormatError(
                f"{printable_path(database)}: this is not an index of LoRA files ({error}); delete it"
            ) from None

    def _create_tables(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 2:
            self._db.execute("ALTER TABLE files ADD COLUMN sample TEXT")
        elif version not in (0, _VERSION):
            tables = ("files", "reading", "deaths", "former")
            self._db.executescript(" ".join(f"DROP TABLE IF EXISTS {table};" for table in tables))
        self._db.executescript(_SCHEMA)
        self._db.execute(f"PRAGMA user_version = {_VERSION}")

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    def _entries(self, where: str, *values: object, tail: str = "ORDER BY path") -> list[LibraryEntry]:
        marks = ", ".join("?" * len(self.folders))
        query = f"SELECT {_COLUMNS} FROM files WHERE present = 1 AND root IN ({marks}) AND ({where}) {tail}"
        return [_entry(row) for row in self._query(query, *map(str, self.folders), *values)]

    def _query(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def _one(self, query: str, *values: object) -> tuple[Any, ...] | None:
        rows = self._query(query, *values)
        return rows[0] if rows else None

    def _execute(self, query: str, values: Iterable[object]) -> None:
        with self._lock:
            self._db.execute(query, tuple(values))

    def _execute_all(self, query: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Run one statement for many rows, in one transaction."""
        with self._lock:
            self._db.execute("BEGIN")
            try:
                self._db.executemany(query, rows)
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


def composed(text: str | None) -> str:
    """Return a text with composed letters (NFC): macOS stores "é" as "e" and an accent."""
    return unicodedata.normalize("NFC", text or "")


def folded(text: str | None) -> str:
    """Return a text in the form that searches compare: composed and without case."""
    return composed(composed(text).casefold())


def trigger_words(sources: str | None) -> str:
    """Return the words of an entry's ``triggers``, one per line."""
    return "\n".join(word for source in json.loads(sources or "[]") for word in source["words"])


def facts_of(document: str) -> LibraryFacts:
    """Return the facts in a JSON text."""
    return LibraryFacts(**_tuples(document))


def document_of(facts: LibraryFacts) -> str:
    """Return facts as JSON text; unpaired surrogates, which a sidecar may contain, become question marks."""
    return json.dumps(facts.as_dict(), ensure_ascii=False).encode("utf-8", "replace").decode()


def _entry(row: tuple[Any, ...]) -> LibraryEntry:
    entry, root, path, size, modified_ns, facts, contents = row
    read = Contents(**_tuples(contents)) if contents else None
    return LibraryEntry(entry, root, path, size, modified_ns / 1e9, facts_of(facts), read)


def _tuples(text: str) -> dict[str, Any]:
    """Parse a JSON object; lists become the tuples of our dataclasses."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()}
