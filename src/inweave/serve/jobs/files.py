"""The pictures of jobs, one folder each.

<job>/input-init.png, input-mask.png    what it was submitted with
<job>/0.png, 1.png, ...                 its results
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import BinaryIO

from inweave.errors import ConflictError, MissingError
from inweave.files.writing import write_atomic
from inweave.serve.jobs.errors import StorageError


class JobFiles:
    """All of them, below one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.root = folder

    def folder(self, job: str) -> Path:
        return self.root / job

    def write(self, job: str, name: str, content: bytes) -> None:
        """A complete file, or none; `StorageError` where the disk is full or cannot be written."""
        self.folder(job).mkdir(exist_ok=True)
        write_atomic(self.folder(job) / name, [content], error=StorageError)

    def write_inputs(self, job: str, inputs: Mapping[str, bytes]) -> int:
        """What a job was submitted with; returns how many bytes that is."""
        for name, content in inputs.items():
            self.write(job, f"input-{name}", content)
        return sum(map(len, inputs.values()))

    def inputs(self, job: str) -> dict[str, Path]:
        """The pictures a job was submitted with, by name."""
        return {path.stem.removeprefix("input-"): path for path in sorted(self.folder(job).glob("input-*"))}

    def result(self, job: str, name: str) -> Path:
        """A file of a job's result; `MissingError` where there is none."""
        path = self.folder(job) / name
        if "/" in name or name.startswith(".") or not name or not path.is_file():
            raise MissingError(f"job {job} has no file {name[:100]}")
        return path

    def result_bytes(self, job: str) -> int:
        return sum(path.stat().st_size for path in self.folder(job).glob("[0-9]*"))

    def remove(self, job: str) -> None:
        shutil.rmtree(self.folder(job), ignore_errors=True)

    def remove_all_but(self, jobs: Collection[str]) -> None:
        """What a process that died left behind."""
        for folder in self.root.iterdir():
            if folder.name not in jobs:
                shutil.rmtree(folder, ignore_errors=True)


def own_folder(folder: Path) -> BinaryIO:
    """The lock that one process holds as long as it lives."""
    file = (folder / "lock").open("ab")  # held open until the store is closed
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConflictError(f"{folder}: another worker uses this folder; choose another one with --data") from None
    return file
