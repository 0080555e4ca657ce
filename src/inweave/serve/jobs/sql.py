"""What the queue needs of a database, and SQLite as one.

Queries are written once, for all databases: values are `?`, times are seconds as floating-point numbers, flags are 0
and 1. A schema names what differs:

    {number}        the type of a key that counts up in the order of insertion
    {one_tree}      how SQLite stores a table in the tree of its key

A row that a transaction changes is read with ``for_update``, so that no other transaction changes it in between. A
transaction with ``queue=True`` is the only such transaction of all processes: what depends on several rows (the number
of waiting jobs, which one is next) stays true until it ends.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from inweave.errors import ConflictError

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """The answer to a query; ``changed``: how many rows it changed."""

    rows: list[Row] = field(default_factory=list)
    changed: int = 0

    def first(self) -> Row | None:
        """Return the first row, if any."""
        return self.rows[0] if self.rows else None

    def value(self) -> Any:
        """Return the only value."""
        return self.rows[0][0]


class Database(Protocol):
    """A database. Safe for threads: a transaction belongs to the thread that began it."""

    #: ends a SELECT whose rows this transaction changes
    for_update: str
    #: whether other processes use the same database
    shared: bool

    def prepare(self, name: str, version: int, schema: str, changes: Mapping[int, Sequence[str]]) -> None:
        """Create the tables of ``schema``, or bring those of an older layout up to date.

        Raises:
            ConflictError: a newer version of inweave wrote them.
        """

    def execute(self, query: str, *values: object) -> Rows:
        """Run one query, in the transaction of this thread or in one of its own."""

    def transaction(self, *, queue: bool = False) -> AbstractContextManager[None]:
        """Commit what happens inside, or nothing; one transaction inside another is part of it."""

    def now(self) -> float | None:
        """Return the time by the clock of the database; None if it has none."""

    def notify(self, text: str) -> None:
        """Send a text to every process that listens, when the transaction is committed."""

    def listen(self, receive: Callable[[str], None]) -> None:
        """Call ``receive`` in a thread with every text, and with an empty one when some may have been missed."""

    def close(self) -> None:
        """End all connections."""


class SqliteDatabase:
    """A file that one process uses."""

    for_update = ""
    shared = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")

    def prepare(self, name: str, version: int, schema: str, changes: Mapping[int, Sequence[str]]) -> None:
        """See `Database`; the number of the layout is that of the file."""
        layout = self._connection.execute("PRAGMA user_version").fetchone()[0]
        ensure_known(str(self._path.parent), layout, version)
        self._connection.executescript(
            schema.format(number="INTEGER PRIMARY KEY AUTOINCREMENT", one_tree=" WITHOUT ROWID")
        )
        with self.transaction():
            for query in changes_from(layout, version, changes):
                self._connection.execute(query)
            self._connection.execute(f"PRAGMA user_version = {version}")

    def execute(self, query: str, *values: object) -> Rows:
        """See `Database`."""
        with self._lock:
            cursor = self._connection.execute(query, values)
            return Rows(cursor.fetchall(), cursor.rowcount)

    @contextlib.contextmanager
    def transaction(self, *, queue: bool = False) -> Iterator[None]:
        """See `Database`; every transaction is the only one."""
        with self._lock:
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                # also after a full disk refused the COMMIT: the open transaction would swallow the next one
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def now(self) -> float | None:
        """See `Database`."""
        return None

    def notify(self, text: str) -> None:
        """See `Database`; no other process listens."""

    def listen(self, receive: Callable[[str], None]) -> None:
        """See `Database`."""

    def close(self) -> None:
        """See `Database`."""
        with self._lock:
            self._connection.close()


def changes_from(layout: int, version: int, changes: Mapping[int, Sequence[str]]) -> list[str]:
    """Return the queries that bring tables up to date; none for those that were just created (layout 0)."""
    return [query for step in range(layout, version) if layout for query in changes[step]]


def ensure_known(place: str, layout: int, version: int) -> None:
    """Raise ConflictError if a newer version of inweave wrote a database."""
    if layout > version:
        raise ConflictError(f"{place}: written by another version of inweave (layout {layout}, this is {version})")
