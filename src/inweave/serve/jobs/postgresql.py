"""PostgreSQL as the database of several web processes: `--store postgresql://USER@HOST/DATABASE` (psycopg 3).

    connections    taken from a few open ones; one that the server closed is replaced before it is used
    queue lock     pg_advisory_xact_lock: one transaction of all processes at a time submits, claims or reorders
    signals        NOTIFY at the end of a transaction, LISTEN on a connection of its own

A transaction that a stopped process left open would hold its locks for ever: the server ends it after
``IDLE_SECONDS``. A network that is cut off is noticed within ``CUT_OFF_SECONDS``.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from inweave.errors import ConfigError
from inweave.serve.jobs.errors import DatabaseLost, StorageError
from inweave.serve.jobs.sql import Rows, changes_from, ensure_known

log = logging.getLogger("inweave.serve")
CHANNEL = "inweave"
#: the keys of the advisory locks, which only have to differ from those of other programs in this database
QUEUE_LOCK, LAYOUT_LOCK = 0x696E7765, 0x696E7766
IDLE_SECONDS, CUT_OFF_SECONDS = 5, 10
#: how long a query waits for a server that is restarting
PATIENCE = 5.0
MAX_IDLE = 8
_OPTIONS: dict[str, Any] = {
    "connect_timeout": 5, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3,
    "tcp_user_timeout": 1000 * CUT_OFF_SECONDS, "application_name": "inweave",
}  # fmt: skip
_SESSION = (
    f"SET idle_in_transaction_session_timeout = {1000 * IDLE_SECONDS}; SET lock_timeout = {1000 * CUT_OFF_SECONDS}; "
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
)
Connection = psycopg.Connection[tuple[Any, ...]]


class PostgresDatabase:
    """The database of a URL. Every error of the connection is a DatabaseLost."""

    for_update = " FOR UPDATE"
    shared = True

    def __init__(self, url: str) -> None:
        try:
            self._options = _OPTIONS | conninfo_to_dict(url)
        except psycopg.Error:  # its message may quote the password
            expected = "expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE, special characters as %20"
            raise ConfigError(f"--store: not the address of a PostgreSQL database; {expected}") from None
        self._idle: list[Connection] = []
        self._guard = threading.Lock()
        self._thread = threading.local()
        self._closed = threading.Event()
        self._listener: threading.Thread | None = None
        try:
            self._give(self._connect())
        except psycopg.Error as error:
            raise ConfigError(f"--store: the database cannot be used: {_line(error)}") from None

    # connections

    def _connect(self) -> Connection:
        connection = psycopg.connect(**self._options, autocommit=True, prepare_threshold=None)
        connection.execute(_SESSION)
        return connection

    def _take(self) -> Connection:
        """Return a connection that was alive a moment ago; wait a little for a server that is restarting."""
        while True:
            with self._guard:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                break
            if not _has_input(connection):  # an idle server has nothing to say but that it ends
                return connection
            connection.close()
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self._connect()
            except psycopg.OperationalError as error:
                if time.monotonic() > deadline or self._closed.is_set():
                    raise DatabaseLost(_line(error)) from error
            time.sleep(0.1)

    def _give(self, connection: Connection) -> None:
        idle = psycopg.pq.TransactionStatus.IDLE
        if not connection.closed and connection.info.transaction_status == idle:
            with self._guard:
                if len(self._idle) < MAX_IDLE and not self._closed.is_set():
                    self._idle.append(connection)
                    return
        connection.close()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        """Yield the connection of this thread's transaction, or another one."""
        if (own := getattr(self._thread, "connection", None)) is not None:
            yield own
            return
        connection = self._take()
        try:
            yield connection
        finally:
            self._give(connection)

    # queries

    def prepare(self, name: str, version: int, schema: str, changes: Mapping[int, Sequence[str]]) -> None:
        """See `Database`; numbers of layouts are in the table ``layouts``."""
        with self.transaction():
            self.execute("SELECT pg_advisory_xact_lock(?)", LAYOUT_LOCK)  # two processes may start at once
            self.execute("CREATE TABLE IF NOT EXISTS layouts (name TEXT PRIMARY KEY, version BIGINT NOT NULL)")
            row = self.execute("SELECT version FROM layouts WHERE name = ?", name).first()
            layout = row[0] if row is not None else 0
            ensure_known("--store", layout, version)
            for query in schema.format(number="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY", one_tree="").split(
                ";"
            ):
                if query.strip():
                    self.execute(query)
            for query in changes_from(layout, version, changes):
                self.execute(query)
            self.execute(
                "INSERT INTO layouts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET version = excluded.version",
                name, version,
            )  # fmt: skip

    def execute(self, query: str, *values: object) -> Rows:
        """See `Database`; text cannot hold NUL."""
        texts = [value.replace("\0", "\ufffd") if isinstance(value, str) else value for value in values]
        with self._connection() as connection, _translated():
            cursor = connection.execute(query.replace("?", "%s"), texts)
            return Rows(cursor.fetchall() if cursor.description is not None else [], cursor.rowcount)

    @contextlib.contextmanager
    def transaction(self, *, queue: bool = False) -> Iterator[None]:
        """See `Database`."""
        if getattr(self._thread, "connection", None) is not None:
            yield
            return
        with self._connection() as connection:
            self._thread.connection = connection
            try:
                self.execute("BEGIN")
                if queue:
                    self.execute("SELECT pg_advisory_xact_lock(?)", QUEUE_LOCK)
                yield
                self.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(psycopg.Error):
                    connection.execute("ROLLBACK")
                raise
            finally:
                self._thread.connection = None

    def now(self) -> float | None:
        """See `Database`."""
        return float(self.execute("SELECT extract(epoch FROM clock_timestamp())").value())

    # signals

    def notify(self, text: str) -> None:
        """See `Database`."""
        self.execute("SELECT pg_notify(?, ?)", CHANNEL, text)

    def listen(self, receive: Callable[[str], None]) -> None:
        """See `Database`; it connects again after the connection was lost."""

        def hear() -> None:
            while not self._closed.is_set():
                try:
                    with self._connect() as connection:
                        connection.execute(f"LISTEN {CHANNEL}")
                        receive("")
                        while not self._closed.is_set():
                            for signal in connection.notifies(timeout=0.5):
                                receive(signal.payload)
                except psycopg.Error as error:
                    log.warning("signals of the database are interrupted: %s", _line(error))
                    self._closed.wait(0.5)

        self._listener = threading.Thread(target=hear, name="inweave-listen", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """See `Database`."""
        self._closed.set()
        if self._listener is not None:
            self._listener.join(2.0)
        with self._guard:
            while self._idle:
                self._idle.pop().close()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (errors.DiskFull, errors.ReadOnlySqlTransaction) as error:
        raise StorageError(f"the database refuses to write: {_line(error)}") from error
    except (psycopg.OperationalError, psycopg.InterfaceError, errors.IdleInTransactionSessionTimeout) as error:
        raise DatabaseLost(_line(error)) from error


def _has_input(connection: Connection) -> bool:
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
