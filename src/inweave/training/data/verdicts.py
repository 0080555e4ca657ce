"""Verdicts on image files: properties that need every pixel, remembered until the file changes.

    <cache>/images.sqlite3     (path, whether it is read as a mask) -> the file's stamp, its `ImageInfo`

A file is decoded once for all checks, runs and resumes that share a cache, and an interrupted check continues where it
stopped. Files that cannot be read are not remembered: a package that is installed later may read them. A file that
changed a moment ago is looked at again first, since the clock of a file system advances in ticks and a further change
within one would leave the same stamp. Without a folder, or if it cannot be written, every file is decoded.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

from inweave.errors import FormatError
from inweave.files.paths import printable_path
from inweave.files.stamps import ABSENT, Stamp, path_stamp
from inweave.files.writing import make_folder
from inweave.training.data.images import ImageInfo, probe_image

NAME = "images.sqlite3"
VERSION = 1  # incremented when the same file leads to another verdict
_TICK = 20_000_000  # nanoseconds, more than a tick of the clock of local file systems
_BATCH = 256  # files between two commits
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS verdicts (path BLOB, mask INTEGER, stamp TEXT, info TEXT, PRIMARY KEY (path, mask))"
)

OnFile = Callable[[int, int], None]  # (files done, all files)


class Verdicts:
    """The verdicts in a folder. ``decoded`` counts files; ``notes``: why they could not be remembered."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / NAME
        self.decoded = 0
        self.notes: list[str] = []

    def probe(self, files: Mapping[Path, bool], on_file: OnFile | None = None) -> dict[Path, ImageInfo | str]:
        """Return the properties of these files, or why one cannot be read; the value says whether it is a mask."""
        infos: dict[Path, ImageInfo | str] = {}
        with closing(self._open()) as database, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            rows = list(files.items())
            for batch in (rows[start : start + _BATCH] for start in range(0, len(rows), _BATCH)):
                infos |= self._known(database, batch)
                unknown = [row for row in batch if row[0] not in infos]
                if unknown:
                    probed = list(pool.map(_probe, *zip(*unknown, strict=True)))
                    infos |= {path: info for (path, _), (_, info) in zip(unknown, probed, strict=True)}
                    self.decoded += len(unknown)
                    self._keep(database, unknown, probed)
                    if on_file is not None:
                        on_file(len(infos), len(files))
        return infos

    def _open(self) -> sqlite3.Connection:
        if self._file is not None:
            for _ in range(2):
                try:
                    make_folder(self._file.parent)
                    return _database(self._file)
                except sqlite3.OperationalError as error:  # locked, or in a folder that is read-only
                    self._note(str(error))
                    break
                except sqlite3.DatabaseError:
                    self.notes.append(f"{printable_path(self._file)}: damaged, started again; images are decoded again")
                    with suppress(OSError):
                        self._file.unlink()
                except (FormatError, OSError) as error:
                    self._note(str(error))
                    break
            self._file = None
        return _database(None)

    def _note(self, reason: str) -> None:
        place = printable_path(self._file or Path(NAME))
        self.notes.append(f"{place}: cannot be used ({reason}), so images are decoded again the next time")

    def _known(
        self, database: sqlite3.Connection, batch: Sequence[tuple[Path, bool]]
    ) -> Iterator[tuple[Path, ImageInfo]]:
        if self._file is None:
            return
        for path, mask in batch:
            query = "SELECT stamp, info FROM verdicts WHERE path = ? AND mask = ?"
            with suppress(sqlite3.Error):
                row = database.execute(query, (_key(path), mask)).fetchone()
                if row is not None and row[0] == _text(path_stamp(path)) and (info := _info(row[1])) is not None:
                    yield path, info

    def _keep(
        self, database: sqlite3.Connection, files: Sequence[tuple[Path, bool]],
        probed: Sequence[tuple[Stamp, ImageInfo | str]],
    ) -> None:  # fmt: skip
        if self._file is None:
            return
        rows = [
            (_key(path), mask, _text(stamp), json.dumps(info))
            for (path, mask), (stamp, info) in zip(files, probed, strict=True)
            if stamp and not isinstance(info, str)
        ]
        try:
            with database:
                database.executemany("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?)", rows)
        except sqlite3.Error as error:
            self._note(str(error))
            self._file = None


def _database(file: Path | None) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:" if file is None else file, timeout=30)
    try:
        if database.execute("PRAGMA user_version").fetchone()[0] != VERSION:
            database.execute("DROP TABLE IF EXISTS verdicts")
            database.execute(_SCHEMA)
            database.execute(f"PRAGMA user_version = {VERSION}")
            database.commit()
        database.execute("SELECT stamp, info, mask FROM verdicts WHERE path = x''").fetchone()
    except BaseException:
        database.close()
        raise
    return database


def _probe(path: Path, mask: bool) -> tuple[Stamp, ImageInfo | str]:
    """Return (the stamp of a file, its properties); `ABSENT` if it changed meanwhile, or in a tick that goes on."""
    stamp = path_stamp(path)
    if stamp and 0 <= (age := time.time_ns() - stamp[-1]) < _TICK:
        time.sleep((_TICK - age) / 1e9)
        stamp = path_stamp(path)
    settled = stamp and time.time_ns() - stamp[-1] >= _TICK
    info = probe_image(path, mask)
    return stamp if settled and stamp == path_stamp(path) else ABSENT, info


def _key(path: Path) -> bytes:
    return os.fsencode(path.absolute())


def _text(stamp: Stamp) -> str:
    """Return a stamp without the number of the device, which mounting may change."""
    return "/".join(map(str, stamp[1:]))


def _info(text: str) -> ImageInfo | None:
    try:
        size, sha256, alpha, black, stored, orientation, frames = json.loads(text)
        (width, height), (across, down) = map(int, size), map(int, stored)
    except (ValueError, TypeError):
        return None
    sizes = (width, height), (across, down)
    return ImageInfo(sizes[0], str(sha256), bool(alpha), bool(black), sizes[1], int(orientation), bool(frames))
