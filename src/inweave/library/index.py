"""The library: an index in SQLite over folders of LoRA files.

    library = Library(Path("library.sqlite3"), [Path("loras")])
    library.scan()                       reads headers of new and changed files; a second scan only lists the folders
    library.examine()                    reads whole files for hashes and health, the newest first
    library.find("pixel")                by name, path below the folder, id or hash

A file keeps its id when it is moved or renamed: at once if its inode shows it, otherwise when its hash is known. A
file that takes the place of another gets a new id, and the other one keeps its id if it turns up elsewhere. Files of a
folder that cannot be reached are not listed until it can. A file whose reading crashed the process twice is recorded as
such and not opened again until it changes; a single crash may have another cause. Several processes may scan one index
at a time.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inweave.errors import MissingError
from inweave.files.confinement import confined
from inweave.library.database import document_of, facts_of
from inweave.library.entry import Contents, LibraryEntry, LibraryFacts, entry_name
from inweave.library.examine import Examiner, sample
from inweave.library.lookup import Lookup
from inweave.library.processes import is_alive, process_mark
from inweave.library.walk import PEFT_WEIGHTS, Sighting, identity, sight, walk

FATAL = "reading it crashed the process; the file is damaged or hostile: delete it, or download it again"


@dataclass(slots=True)
class ScanReport:
    """The result of a scan."""

    files: int = 0
    new: int = 0
    changed: int = 0
    moved: int = 0
    gone: int = 0
    passed_over: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class Library(Lookup):
    """An index over ``folders``; files in other folders override those of the last one by name. Safe for threads."""

    def __init__(self, database: Path, folders: Sequence[Path]) -> None:
        super().__init__(database, folders)
        self._examiner = Examiner()
        self._process = process_mark()

    # scanning

    def scan(self, progress: Callable[[int], object] | None = None) -> ScanReport:
        """Bring the index up to date with the folders: read the headers of new and changed files."""
        started, report = time.perf_counter(), ScanReport()
        self._record_fatal()
        for folder in self.folders:
            root = str(folder)
            query = "SELECT path, stamp, size, present, inode, sample FROM files WHERE root = ?"
            known = {row[0]: row[1:] for row in self._query(query, root)}
            fresh: list[Sighting] = []
            back: list[str] = []
            for sighting in walk(folder, report.passed_over):
                report.files += 1
                row = known.pop(sighting.path, None)
                if (
                    row is None
                    or row[:2] != (sighting.stamp, sighting.size)
                    or not self._is_same(folder, sighting, row)
                ):
                    fresh.append(sighting)
                    report.changed += row is not None
                elif not row[2]:
                    back.append(sighting.path)
            gone = [path for path, row in known.items() if row[2]]
            report.gone += len(gone)
            change = "UPDATE files SET present = ? WHERE root = ? AND path = ?"
            self._execute_all(change, [(0, root, path) for path in gone] + [(1, root, path) for path in back])
            for number, sighting in enumerate(fresh):
                self._take_in(folder, sighting, report)
                if progress is not None:
                    progress(number)
        report.seconds = round(time.perf_counter() - started, 3)
        return report

    def hide(self, folder: Path) -> None:
        """Hide the files of a folder that cannot be reached now; the next scan that reaches them lists them again."""
        self._execute("UPDATE files SET present = 0 WHERE root = ?", (str(folder),))

    def _is_same(self, folder: Path, sighting: Sighting, row: Sequence[Any]) -> bool:
        """Return whether a file of the same size and time is the same.

        Its inode decides, or a digest: some file systems assign new inodes.
        """
        *_, inode, known_sample = row
        if not inode or inode == sighting.inode or known_sample is None:
            return True
        with confined(folder):
            if sample(folder / sighting.path) != known_sample:
                return False
        self._execute(
            "UPDATE files SET inode = ? WHERE root = ? AND path = ?", (sighting.inode, str(folder), sighting.path)
        )
        return True

    def _take_in(self, folder: Path, sighting: Sighting, report: ScanReport) -> None:
        """Read the header of a new, changed or moved file into the index."""
        root, path = str(folder), sighting.path
        with self._reading(root, path, sighting.stamp, sighting.size), confined(folder):
            document = document_of(self._examiner.facts(folder / path, sighting.siblings))
            digest = sample(folder / path)
        facts = facts_of(document)
        values = (root, path, entry_name(path), facts.alias, sighting.size, sighting.modified_ns, sighting.inode,
                  sighting.stamp, facts.base, document, digest)  # fmt: skip
        with self._lock:
            query = "SELECT id, size, modified_ns, sample, stamp FROM files WHERE root = ? AND path = ?"
            here = self._one(query, root, path)
            if here is not None and here[1:3] == (sighting.size, sighting.modified_ns) and here[3] in (None, digest):
                entry = here[0]
                if "-" in (mark := here[4].partition("/")[0]) and mark != sighting.stamp.partition("/")[0]:
                    self._execute(  # something between its ends may have been written: it is read as a whole again
                        "UPDATE files SET contents = NULL, sha256 = NULL, autov1 = NULL, autov2 = NULL, autov3 = NULL "
                        "WHERE id = ?", (entry,),
                    )  # fmt: skip
            else:
                if here is not None:  # its own file may turn up again elsewhere
                    self._execute("UPDATE files SET root = '', path = id, present = 0 WHERE id = ?", here[:1])
                entry = self._moved_from(sighting, digest)
                report.moved += entry is not None
                report.new += entry is None and here is None
            if entry is None:
                self._execute(
                    "INSERT INTO files "
                    "(root, path, name, alias, size, modified_ns, inode, stamp, base, facts, sample, id) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*values, self._free_id(sighting, digest)),
                )  # fmt: skip
                return
            self._execute(
                "UPDATE files SET root = ?, path = ?, name = ?, alias = ?, size = ?, modified_ns = ?, inode = ?, "
                "stamp = ?, base = ?, facts = ?, sample = ?, present = 1 WHERE id = ?", (*values, entry),
            )  # fmt: skip

    def _free_id(self, sighting: Sighting, digest: str | None) -> str:
        """Return an id that the indexes of other machines give the same file, unless another file here has it."""
        content = f"{sighting.size} {digest}"
        for text in (content, f"{content} {sighting.path}") if digest is not None else ():
            entry = f"lora-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"
            query = "SELECT 1 FROM files WHERE id = ? UNION SELECT 1 FROM former WHERE former = ?"
            if self._one(query, entry, entry) is None:
                return entry
        return _new_id()

    def _moved_from(self, sighting: Sighting, digest: str | None) -> str | None:
        """Return the id of a file with the same inode, size and time that is no longer at its old path."""
        query = (
            "SELECT id, root, path FROM files "
            "WHERE inode = ? AND size = ? AND modified_ns = ? AND ifnull(sample, ?) IS ?"
        )
        for entry, root, path in self._query(
            query, sighting.inode, sighting.size, sighting.modified_ns, digest, digest
        ):
            now = identity(Path(root), path) if root else None
            if now is None or not now.is_renamed(sighting):
                return str(entry)
        return None

    def _confirm(self, entry: LibraryEntry) -> bool:
        """Return whether the file of an entry is the indexed one; otherwise update the index."""
        root = Path(entry.root)
        row = self._one("SELECT size, stamp, present, inode, sample FROM files WHERE id = ?", entry.id)
        now = identity(root, entry.path)
        if row is None or now is None:
            self._execute("UPDATE files SET present = 0 WHERE id = ? AND root = ?", (entry.id, entry.root))
            return False
        if (row[0], row[1].partition("/")[0], row[3] or now.inode) == (now.size, now.mark, now.inode):
            return True
        sighting = sight(root, entry.path)
        if sighting is None:
            self._execute("UPDATE files SET present = 0 WHERE id = ? AND root = ?", (entry.id, entry.root))
        elif (now.size, now.mark) == (row[0], row[1].partition("/")[0]) and self._is_same(root, sighting, row):
            return True
        else:
            self._take_in(root, sighting, ScanReport())
        return False

    @contextmanager
    def _reading(self, root: str, path: str, stamp: str, size: int) -> Iterator[None]:
        """Record that a file is being read, so that the next process knows if this one does not survive it."""
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
        """Record the files that were being read when a process died; those of living processes are left alone."""
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
                (_new_id(), root, path, entry_name(path), size, stamp, json.dumps(LibraryFacts(error=FATAL).as_dict())),
            )

    def examine(self, *, limit: int | None = None, stop: Callable[[], bool] | None = None) -> int:
        """Read files that were not read as a whole yet, for hashes and health; return how many were read."""
        marks = ", ".join("?" * len(self.folders))
        query = (
            "SELECT id, root, path, stamp, size, facts FROM files "
            f"WHERE contents IS NULL AND present = 1 AND root IN ({marks}) "
            "AND json_extract(facts, '$.error') IS NULL ORDER BY modified_ns DESC"
        )
        done = 0
        for entry, root, path, stamp, size, document in self._query(query, *map(str, self.folders))[:limit]:
            if stop is not None and stop():
                break
            before = identity(Path(root), path)
            try:
                self.get(entry)
            except MissingError:
                continue  # it is gone, or was replaced by another file, which is read the next time
            file, facts = Path(root) / path, facts_of(document)
            with self._reading(root, path, stamp, size), confined(Path(root)):
                read = self._examiner.contents(file / PEFT_WEIGHTS if file.is_dir() else file, facts)
            if read is not None and identity(Path(root), path) == before:
                self._keep_contents(entry, *read)
                done += 1
        return done

    def _keep_contents(self, entry: str, contents: Contents, facts: LibraryFacts) -> None:
        with self._lock:
            query = "SELECT id, root FROM files WHERE sha256 = ? AND present = 0 AND id != ?"
            for earlier, root in self._query(query, contents.sha256, entry):
                if root and not Path(root).is_dir():
                    continue  # that file is on a disk that is not mounted now
                # the same file under another name, seen before: it keeps the id it had
                self._execute("DELETE FROM files WHERE id = ?", (earlier,))
                self._execute("UPDATE files SET id = ? WHERE id = ?", (earlier, entry))
                self._execute("UPDATE former SET id = ? WHERE id = ?", (earlier, entry))
                self._execute("INSERT OR REPLACE INTO former VALUES (?, ?)", (entry, earlier))
                entry = earlier
                break
            self._execute(
                "UPDATE files SET facts = ?, base = ?, contents = ?, sha256 = ?, autov1 = ?, autov2 = ?, autov3 = ? "
                "WHERE id = ?",
                (document_of(facts), facts.base, json.dumps(contents.as_dict()), contents.sha256, contents.autov1,
                 contents.autov2, contents.autov3, entry),
            )  # fmt: skip


def _new_id() -> str:
    return f"lora-{secrets.token_hex(8)}"
