"""The images of jobs, one folder each.

<job>/input-init.png, input-mask.png    its inputs
<job>/0.png, 1.png, ...                 its results
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import BinaryIO

from inweave.errors import ConflictError, MissingError
from inweave.files.writing import write_atomic
from inweave.serve.jobs.errors import StorageError


class JobFiles:
    """The files of all jobs, below one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.root = folder

    def folder(self, job: str) -> Path:
        """Return the folder of a job."""
        return self.root / job

    def write(self, job: str, name: str, content: bytes) -> None:
        """Write a complete file, or none; raise StorageError if the disk is full or read-only."""
        self.folder(job).mkdir(exist_ok=True)
        write_atomic(self.folder(job) / name, [content], error=StorageError)

    def write_inputs(self, job: str, inputs: Mapping[str, bytes]) -> int:
        """Write the inputs of a job; return their size in bytes."""
        for name, content in inputs.items():
            self.write(job, f"input-{name}", content)
        return sum(map(len, inputs.values()))

    def inputs(self, job: str) -> dict[str, Path]:
        """Return the input images of a job by name."""
        return {path.stem.removeprefix("input-"): path for path in sorted(self.folder(job).glob("input-*"))}

    def result(self, job: str, name: str) -> Path:
        """Return the path of a file of a job's result; raise MissingError if it does not exist."""
        path = self.folder(job) / name
        if "/" in name or name.startswith(".") or not name or not path.is_file():
            raise MissingError(f"job {job} has no file {name[:100]}")
        return path

    def result_bytes(self, job: str) -> int:
        """Return the size of a job's results."""
        return sum(path.stat().st_size for path in self.folder(job).glob("[0-9]*"))

    def remove(self, job: str) -> None:
        """Remove all files of a job."""
        shutil.rmtree(self.folder(job), ignore_errors=True)

    def remove_all_but(self, jobs: Collection[str], older_than: float = 0.0) -> None:
        """Remove the files of all other jobs, which a dead process left behind ``older_than`` seconds ago."""
        for folder in self.root.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process removes the same
                if folder.name not in jobs and time.time() - folder.stat().st_mtime >= older_than:
                    shutil.rmtree(folder, ignore_errors=True)


def own_folder(folder: Path) -> BinaryIO:
    """Return the lock on a folder, which one process holds as long as it lives; raise ConflictError if it is taken."""
    file = (folder / "lock").open("ab")  # held open until the store is closed
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConflictError(f"{folder}: another worker uses this folder; choose another one with --data") from None
    return file
