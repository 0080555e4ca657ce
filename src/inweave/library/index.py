"""The library: an index in SQLite over folders of LoRA files.

    library = Library(Path("library.sqlite3"), [Path("loras")])
    library.scan()                       headers of what is new or changed; a second scan only looks at the folders
    library.examine()                    hashes and health, from whole files, what is new first
    library.find("pixel")                by name, path below the folder, id or hash

A file keeps its id when it is moved or renamed: at once where its inode shows it, else when its hash is known. A file
whose reading ended the process twice is recorded as such and not opened again until it changes; once may be chance.
Several processes may scan one index at a time.
"""

from __future__ import annotations

import difflib
import json
import posixpath
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, ConflictError, FormatError, MissingError
from inweave.library.entry import Contents, Entry, Facts, entry_name
from inweave.library.examine import Examiner
from inweave.library.processes import is_alive, process_mark
from inweave.library.walk import PEFT_WEIGHTS, Sighting, is_unicode, walk

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
    UNIQUE (root, path)
);
CREATE INDEX IF NOT EXISTS files_by_name ON files (name);
CREATE INDEX IF NOT EXISTS files_by_sha256 ON files (sha256);
CREATE TABLE IF NOT EXISTS reading (root TEXT, path TEXT, stamp TEXT, size INTEGER, process TEXT);
CREATE TABLE IF NOT EXISTS deaths (root TEXT, path TEXT, stamp TEXT, UNIQUE (root, path));
"""
_VERSION = 2
_COLUMNS = "id, root, path, size, modified_ns, facts, contents"
_HASHES = {8: "autov1", 10: "autov2", 12: "autov3", 64: "sha256"}
FATAL = "reading it ended the process; the file is damaged or hostile"


@dataclass(slots=True)
class ScanReport:
    """What a scan saw."""

    files: int = 0
    new: int = 0
    changed: int = 0
    moved: int = 0
    gone: int = 0
    passed_over: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class Library:
    """An index over ``folders``; entries of the last folder give way to others of the same name. Safe for threads."""

    def __init__(self, database: Path, folders: Sequence[Path]) -> None:
        missing = [str(folder) for folder in folders if not folder.is_dir()]
        if missing:
            raise MissingError(f"{missing[0]}: there is no such folder")
        self.folders = [folder.resolve() for folder in folders]
        for folder in self.folders:
            if not is_unicode(str(folder)):
                raise ConfigError(
                    f"{ascii(str(folder))[1:-1]}: the path of a library must be Unicode; rename the folder"
                )
        database.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._examiner = Examiner()
        self._process = process_mark()
        try:
            self._db = sqlite3.connect(database, isolation_level=None, check_same_thread=False, timeout=30)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")  # an index that lost its last moments is scanned again
            if self._db.execute("PRAGMA user_version").fetchone()[0] not in (0, _VERSION):
                self._db.executescript(
                    "DROP TABLE IF EXISTS files; DROP TABLE IF EXISTS reading; DROP TABLE IF EXISTS deaths;"
                )
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {_VERSION}")
        except sqlite3.DatabaseError as error:
            raise FormatError(f"{database}: this is not an index of LoRA files ({error}); delete it") from None

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # scanning

    def scan(self, progress: Callable[[int], object] | None = None) -> ScanReport:
        """Bring the index up to date with the folders: read the headers of what is new or changed."""
        started, report = time.perf_counter(), ScanReport()
        self._record_fatal()
        for folder in self.folders:
            root = str(folder)
            known = {
                row[0]: row[1:]
                for row in self._query("SELECT path, stamp, size, present FROM files WHERE root = ?", root)
            }
            fresh: list[Sighting] = []
            for sighting in walk(folder, report.passed_over):
                report.files += 1
                row = known.pop(sighting.path, None)
                if row is None or row[:2] != (sighting.stamp, sighting.size) or not row[2]:
                    fresh.append(sighting)
                    report.changed += row is not None
            gone = [path for path, row in known.items() if row[2]]
            report.gone += len(gone)
            with self._lock:
                self._db.execute("BEGIN")
                self._db.executemany(
                    "UPDATE files SET present = 0 WHERE root = ? AND path = ?", [(root, path) for path in gone]
                )
                self._db.execute("COMMIT")
            for number, sighting in enumerate(fresh):
                self._take_in(folder, sighting, report)
                if progress is not None:
                    progress(number)
        report.seconds = round(time.perf_counter() - started, 3)
        return report

    def _take_in(self, folder: Path, sighting: Sighting, report: ScanReport) -> None:
        root, path = str(folder), sighting.path
        row = self._one("SELECT id, size, modified_ns FROM files WHERE root = ? AND path = ?", root, path)
        if row is None and (earlier := self._moved_from(sighting)) is not None:
            row = (earlier, sighting.size, sighting.modified_ns)
            report.moved += 1
        elif row is None:
            report.new += 1
        with self._reading(root, path, sighting.stamp, sighting.size):
            document = _document(self._examiner.facts(folder / path, sighting.siblings))
        facts = Facts(**_tuples(document))
        values = (root, path, entry_name(path), facts.alias, sighting.size, sighting.modified_ns, sighting.inode,
                  sighting.stamp, facts.base, document)  # fmt: skip
        if row is None:
            self._execute(
                "INSERT INTO files (root, path, name, alias, size, modified_ns, inode, stamp, base, facts, id) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*values, _new_id()),
            )  # fmt: skip
            return
        same = row[1:] == (sighting.size, sighting.modified_ns)
        forget = "" if same else ", contents = NULL, sha256 = NULL, autov1 = NULL, autov2 = NULL, autov3 = NULL"
        self._execute(
            "UPDATE files SET root = ?, path = ?, name = ?, alias = ?, size = ?, modified_ns = ?, inode = ?, stamp = ?, "
            f"base = ?, facts = ?, present = 1{forget} WHERE id = ?", (*values, row[0]),
        )  # fmt: skip

    def _moved_from(self, sighting: Sighting) -> str | None:
        """The entry of a file that is gone from where it was and has the same inode, size and time."""
        query = "SELECT id, root, path FROM files WHERE inode = ? AND size = ? AND modified_ns = ?"
        for entry, root, path in self._query(query, sighting.inode, sighting.size, sighting.modified_ns):
            if not (Path(root) / path).exists():
                return str(entry)
        return None

    @contextmanager
    def _reading(self, root: str, path: str, stamp: str, size: int) -> Iterator[None]:
        """While a file is read the index says so: if the process does not survive it, the next one knows."""
        row = (root, path, stamp, size, self._process)
        self._execute("INSERT INTO reading VALUES (?, ?, ?, ?, ?)", row)
        try:
            yield
        finally:
            self._execute(
                "DELETE FROM reading WHERE root = ? AND path = ? AND process = ?", (root, path, self._process)
            )
        self._execute("DELETE FROM deaths WHERE root = ? AND path = ?", (root, path))

    def _record_fatal(self) -> None:
        """Record the files that were being read when a process died; what others read now is theirs."""
        for root, path, stamp, size, process in self._query("SELECT root, path, stamp, size, process FROM reading"):
            if is_alive(process):
                continue
            self._execute("DELETE FROM reading WHERE root = ? AND path = ? AND process = ?", (root, path, process))
            if self._one("SELECT 1 FROM deaths WHERE root = ? AND path = ? AND stamp = ?", root, path, stamp) is None:
                self._execute("INSERT OR REPLACE INTO deaths VALUES (?, ?, ?)", (root, path, stamp))
                continue
            self._execute(
                "INSERT INTO files (id, root, path, name, size, modified_ns, inode, stamp, facts) "
                "VALUES (?, ?, ?, ?, ?, 0, 0, ?, ?) ON CONFLICT (root, path) DO UPDATE SET "
                "size = excluded.size, stamp = excluded.stamp, facts = excluded.facts, contents = NULL",
                (_new_id(), root, path, entry_name(path), size, stamp, json.dumps(Facts(error=FATAL).as_dict())),
            )

    def examine(self, *, limit: int | None = None, stop: Callable[[], bool] | None = None) -> int:
        """Read whole files that were not yet, for hashes and health; returns how many were read."""
        marks = ", ".join("?" * len(self.folders))
        query = (
            f"SELECT id, root, path, stamp, size, facts FROM files WHERE contents IS NULL AND present = 1 AND root IN ({marks}) "
            "AND json_extract(facts, '$.error') IS NULL ORDER BY modified_ns DESC"
        )
        done = 0
        for entry, root, path, stamp, size, document in self._query(query, *map(str, self.folders))[:limit]:
            if stop is not None and stop():
                break
            file = Path(root) / path
            facts = Facts(**_tuples(document))
            with self._reading(root, path, stamp, size):
                read = self._examiner.contents(file / PEFT_WEIGHTS if file.is_dir() else file, facts)
            if read is not None:
                contents, corrected = read
                if corrected != facts:
                    self._execute("UPDATE files SET facts = ? WHERE id = ?", (_document(corrected), entry))
                self._keep_contents(entry, contents)
                done += 1
        return done

    def _keep_contents(self, entry: str, contents: Contents) -> None:
        with self._lock:
            earlier = self._one(
                "SELECT id FROM files WHERE sha256 = ? AND present = 0 AND id != ?", contents.sha256, entry
            )
            if earlier is not None:  # the same file under another name, seen before: it keeps the id it had
                self._execute("DELETE FROM files WHERE id = ?", earlier)
                self._execute("UPDATE files SET id = ? WHERE id = ?", (earlier[0], entry))
                entry = earlier[0]
            self._execute(
                "UPDATE files SET contents = ?, sha256 = ?, autov1 = ?, autov2 = ?, autov3 = ? WHERE id = ?",
                (
                    json.dumps(contents.as_dict()),
                    contents.sha256,
                    contents.autov1,
                    contents.autov2,
                    contents.autov3,
                    entry,
                ),
            )

    # looking up

    def get(self, entry: str) -> Entry:
        """The entry with an id, or `MissingError`."""
        rows = self._entries("id = ?", entry)
        if not rows:
            raise MissingError(f"LoRA {entry}: not in the library")
        return rows[0]

    def find(self, reference: str) -> Entry:
        """The entry that a name, a path below a folder, an id or a hash means; unknown and ambiguous ones are errors."""
        text = reference
        kind, colon, digits = text.lower().partition(":")
        if colon and kind in _HASHES.values():
            return self._only(reference, self._entries(f"{kind} = ?", digits))
        path = self._below_root(text.replace("\\", "/"))
        for where, value in (
            ("id = ?", text),
            ("path = ?", path),
            ("path = ?", f"{path}.safetensors"),
            ("name = ?", text.removesuffix(".safetensors")),
            ("alias = ?", text),
        ):
            if rows := self._entries(where, value):
                return self._only(reference, rows)
        digits = text.lower().removeprefix("0x")
        if (column := _HASHES.get(len(digits))) and set(digits) <= set("0123456789abcdef"):
            return self._only(reference, self._entries(f"{column} = ?", digits))
        return self._only(reference, [])

    def _below_root(self, path: str) -> str:
        """A path as entries have it; one that names a file of this machine must begin with a folder of the library."""
        whole = posixpath.normpath(str(Path(path).expanduser()) if path.startswith("~/") else path)
        for folder in self.folders:
            if whole.startswith(f"{folder}/"):
                return whole.removeprefix(f"{folder}/")
        return path.removeprefix("./")

    def _only(self, reference: str, rows: list[Entry]) -> Entry:
        if len({row.contents.sha256 if row.contents else row.id for row in rows}) > 1:
            first = [row for row in rows if row.root != str(self.folders[-1])]
            if len(first) != 1:
                raise ConflictError(
                    f"LoRA {reference[:200]}: several files are called so: {', '.join(row.path for row in rows[:5])}; "
                    "name one by its path or hash"
                )
            rows = first
        if not rows:
            names = [row[0] for row in self._query("SELECT DISTINCT name FROM files WHERE present = 1 LIMIT 5000")]
            near = difflib.get_close_matches(reference[:100], names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise MissingError(f"LoRA {reference[:200]}: not in the library{hint}")
        return rows[0]

    def entries(self, text: str = "", *, base: str | None = None, limit: int = 100_000, offset: int = 0) -> list[Entry]:
        """The entries by name; ``text`` must be part of a name, a path, an alias or a trigger word."""
        where, values = ["1"], list[Any]()
        if base is not None:
            where.append("base = ?")
            values.append(base)
        text = text.encode("utf-8", "replace").decode()  # half surrogates of a command line are in no name
        for word in text.lower().split():
            where.append("(lower(path) LIKE ? ESCAPE '!' OR lower(alias) LIKE ? ESCAPE '!' OR "
                         "lower(json_extract(facts, '$.triggers')) LIKE ? ESCAPE '!')")  # fmt: skip
            like = "%" + word.replace("!", "!!").replace("%", "!%").replace("_", "!_") + "%"
            values += [like] * 3
        return self._entries(" AND ".join(where), *values, tail=f"ORDER BY name, path LIMIT {limit} OFFSET {offset}")

    def count(self) -> int:
        """How many files there are."""
        marks = ", ".join("?" * len(self.folders))
        query = f"SELECT count(*) FROM files WHERE present = 1 AND root IN ({marks})"
        return int(self._query(query, *map(str, self.folders))[0][0])

    def duplicates(self) -> list[list[Entry]]:
        """Files that hold the same tensors, whatever their names and metadata."""
        groups: dict[str, list[Entry]] = {}
        for entry in self.entries():
            if entry.contents is not None and entry.contents.autov3:
                groups.setdefault(entry.contents.autov3, []).append(entry)
        return [group for group in groups.values() if len(group) > 1]

    # database

    def _entries(self, where: str, *values: object, tail: str = "ORDER BY path") -> list[Entry]:
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


def _new_id() -> str:
    return f"lora-{secrets.token_hex(8)}"


def _entry(row: tuple[Any, ...]) -> Entry:
    entry, root, path, size, modified_ns, facts, contents = row
    read = Contents(**_tuples(contents)) if contents else None
    return Entry(entry, root, path, size, modified_ns / 1e9, Facts(**_tuples(facts)), read)


def _document(facts: Facts) -> str:
    """JSON that every answer can hold: halves of surrogate pairs, which a sidecar can spell, become question marks."""
    return json.dumps(facts.as_dict(), ensure_ascii=False).encode("utf-8", "replace").decode()


def _tuples(text: str) -> dict[str, Any]:
    """JSON has lists where our records have tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()}
