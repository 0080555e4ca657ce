"""Files of jobs on another machine: the same ones there, or copies by hash in a cache on its disk.

    tree   = one file or one folder, with the files next to it that belong to it
    key    = {"path", "files": [[name relative to the parent, size, mtime_ns], ...], "hash": SHA-256 or null}
    hash   = sha256(name NUL sha256(content) NUL ... of all files, sorted by name)

    <cache>/<hash>/<the names of the tree>     a whole copy; its modification time is that of its last use
    <cache>/<hash>.lock                        locked (shared) by every runner whose job uses the copy

A machine uses its own file if that has the path, the sizes and the times of the original (a shared folder), or the same
hash. Otherwise it receives a copy. Copies that no job uses make room, those first that were not used for longest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from inweave.errors import ConfigError, FormatError
from inweave.files.stamps import Stamp, path_stamp

Key = dict[str, Any]
CHUNK = 32 * 1024 * 1024
MAX_FILES = 10_000
PART_SECONDS = 24 * 3600.0
#: next to a weights file, of the same adapter
COMPANION = "adapter_config.json"


def survey(where: str) -> Key | None:
    """Return the key of a file or folder, without its hash; None if it is a name that each machine looks up itself."""
    path = Path(where).expanduser().absolute()
    if not path.exists():
        return None
    files = [[str(each.relative_to(path.parent)), *_size_and_time(each)] for each in _members(path)]
    return {"path": str(path), "files": sorted(files), "hash": None}


def _members(path: Path) -> Iterator[Path]:
    if path.is_dir():
        for number, each in enumerate(each for each in path.rglob("*") if each.is_file()):
            if number >= MAX_FILES:
                raise ConfigError(f"{path}: more than {MAX_FILES:,} files; a model is expected")
            yield each
        return
    yield path
    if path.name.endswith(".index.json"):
        yield from path.parent.glob("*.safetensors")
    elif (path.parent / COMPANION).is_file():
        yield path.parent / COMPANION


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


class Hashes:
    """The hashes of trees, computed once while their files stay the same."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[Stamp, str]] = {}

    def tree(self, key: Key) -> str:
        """Return the hash of a tree on this machine."""
        parent, total = Path(key["path"]).parent, hashlib.sha256()
        for name, _, _ in key["files"]:
            total.update(f"{name}\0{self._file(parent / name)}\0".encode())
        return total.hexdigest()

    def _file(self, path: Path) -> str:
        stamp = path_stamp(path)
        known = self._files.get(str(path))
        if known is None or known[0] != stamp:
            with path.open("rb") as file:
                known = self._files[str(path)] = (stamp, hashlib.file_digest(file, "sha256").hexdigest())
        return known[1]


class NodeFiles:
    """The files of one runner's jobs on its machine; several runners of a machine share the cache."""

    def __init__(self, cache: Path, budget: int) -> None:
        self.cache, self.budget = cache, budget
        self._hashes = Hashes()
        self._locks: dict[str, IO[bytes]] = {}  # hash -> of the copies that the current job uses
        cache.mkdir(parents=True, exist_ok=True)

    def find(self, key: Key) -> str | None:
        """Return the path on this machine of what a key names; None if a copy is needed, or its hash."""
        path = Path(key["path"])
        own = [(path.parent / name, size, at) for name, size, at in key["files"]]
        try:
            here = [_size_and_time(each) for each, _, _ in own]
        except OSError:
            here = []
        if here == [(size, at) for _, size, at in own]:
            return str(path)
        if key["hash"] is None:
            return None
        if self.use(key["hash"]):
            return str(self.cache / key["hash"] / path.name)
        same_sizes = [size for size, _ in here] == [size for _, size, _ in own]
        try:
            return str(path) if same_sizes and self._hashes.tree(key) == key["hash"] else None
        except OSError:  # it is gone meanwhile
            return None

    def use(self, digest: str) -> bool:
        """Keep a copy until `release`; return False if there is none."""
        lock = (self.cache / f"{digest}.lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_SH)
        folder = self.cache / digest
        if not folder.is_dir():
            lock.close()
            return False
        os.utime(folder)
        self._locks.setdefault(digest, lock)
        return True

    def release(self) -> None:
        """Let the copies of the last job go."""
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()

    def begin(self, key: Key) -> str:
        """Make room for a copy and return the name of the folder that `write` fills."""
        size = sum(each[1] for each in key["files"])
        if size > self.budget:
            raise ConfigError(
                f"{Path(key['path']).name} has {size / 1e9:.3g} GB, and the cache of a node may take "
                f"{self.budget / 1e9:.3g} GB: raise --node-cache-gb, or put the file into a folder that all nodes share"
            )
        for part in self.cache.glob(".*.part"):  # of a runner that was killed
            with contextlib.suppress(FileNotFoundError):  # another runner has completed it
                if time.time() - part.stat().st_mtime > PART_SECONDS:
                    shutil.rmtree(part, ignore_errors=True)
        self._make_room(size)
        name = f".{secrets.token_hex(8)}.part"
        (self.cache / name).mkdir()
        return name

    def write(self, part: str, name: str, offset: int, content: bytes) -> None:
        """Write a piece of a file; names come from another machine and stay inside of the folder."""
        folder = (self.cache / part).resolve()
        path = (folder / name).resolve()
        if not path.is_relative_to(folder) or path == folder:
            raise ConfigError(f"{name}: leads out of its folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(content)

    def complete(self, part: str, key: Key) -> None:
        """Check a copy against its hash and take it into the cache; raise FormatError if it differs."""
        folder = self.cache / part
        anchor = {**key, "path": str(folder / Path(key["path"]).name)}
        if self._hashes.tree(anchor) != key["hash"]:
            shutil.rmtree(folder, ignore_errors=True)
            raise FormatError(
                f"{Path(key['path']).name}: it changed while it was copied to a node; submit the job again"
            )
        try:
            folder.rename(self.cache / key["hash"])
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another runner of this machine was faster
                raise

    def abandon(self, part: str) -> None:
        """Remove a copy that was not completed."""
        shutil.rmtree(self.cache / part, ignore_errors=True)

    def _make_room(self, size: int) -> None:
        copies = sorted((_used_at(each), each, _tree_size(each)) for each in self.cache.iterdir() if _is_copy(each))
        total = sum(room for *_, room in copies)
        for _, folder, room in copies:
            if total + size <= self.budget:
                return
            with (self.cache / f"{folder.name}.lock").open("wb") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue  # a running job uses it
                shutil.rmtree(folder, ignore_errors=True)
            total -= room


def _is_copy(path: Path) -> bool:
    return path.is_dir() and len(path.name) == 64


def _used_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _tree_size(folder: Path) -> int:
    """Return the bytes of a copy, which another runner may be removing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(place) / name).stat().st_size
    return total


def paths_of(values: Iterable[str]) -> dict[str, Key]:
    """Return the key of each path; names without a file on this machine are left out."""
    return {value: key for value in set(values) if (key := survey(value)) is not None}
