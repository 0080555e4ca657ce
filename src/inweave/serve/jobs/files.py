"""The images of jobs, those of one job below its id.

<job>/input-init.png, input-mask.png, input-reference-1.png    its inputs
<job>/0.png, 1.png, ...                                        its results
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import BinaryIO

from inweave.errors import ConflictError, MissingError
from inweave.serve.jobs.blobs import BlobStore

INPUT = "input-"
_RESULT = re.compile(r"[0-9][\w.-]*", re.ASCII)
_INPUT = re.compile(rf"{INPUT}[\w.-]+", re.ASCII)


class JobFiles:
    """The files of all jobs."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs

    def write(self, job: str, name: str, content: bytes) -> None:
        """Write a complete file, or none; raise StorageError if the store is full or read-only."""
        self._blobs.write(f"{job}/{name}", content)

    def write_inputs(self, job: str, inputs: Mapping[str, bytes]) -> int:
        """Write the inputs of a job; return their size in bytes."""
        for name, content in inputs.items():
            self.write(job, f"{INPUT}{name}", content)
        return sum(map(len, inputs.values()))

    def inputs(self, job: str) -> dict[str, bytes]:
        """Return the input images of a job by the names that `write_inputs` got."""
        names = [name for name in self._blobs.sizes(job) if name.startswith(INPUT)]
        return {name.removeprefix(INPUT): self._read(job, name) for name in names}

    def read(self, job: str, name: str) -> bytes:
        """Return a file of a job's result, or one of its inputs; raise MissingError if it does not exist."""
        return self._read(job, _file_name(job, name))

    def path(self, job: str, name: str) -> Path | None:
        """Return the path of such a file, if it is a file of this machine."""
        return self._blobs.path(f"{job}/{_file_name(job, name)}")

    def _read(self, job: str, name: str) -> bytes:
        content = self._blobs.read(f"{job}/{name}")
        if content is None:
            raise MissingError(f"job {job} has no file {name[:100]}")
        return content

    def result_bytes(self, job: str) -> int:
        """Return the size of a job's results."""
        return sum(size for name, size in self._blobs.sizes(job).items() if _RESULT.fullmatch(name))

    def remove_result(self, job: str, name: str) -> None:
        """Remove a file of a job's result."""
        self._blobs.remove(f"{job}/{_result_name(job, name)}")

    def remove(self, job: str) -> None:
        """Remove all files of a job."""
        self._blobs.remove(job)

    def remove_all_but(self, jobs: Collection[str], older_than: float = 0.0) -> None:
        """Remove the files of all other jobs, which a dead process left behind ``older_than`` seconds ago."""
        for job, age in self._blobs.ages().items():
            if job not in jobs and age >= older_than:
                self._blobs.remove(job)


def _file_name(job: str, name: str) -> str:
    """Return the name of a result or an input; raise MissingError for a name that neither has."""
    return name if _INPUT.fullmatch(name) else _result_name(job, name)


def _result_name(job: str, name: str) -> str:
    """Return the name of a result; raise MissingError for a name that no result has."""
    if not _RESULT.fullmatch(name):
        raise MissingError(f"job {job} has no file {name[:100]}")
    return name


def own_folder(folder: Path) -> BinaryIO:
    """Return the lock on a folder, which one process holds as long as it lives; raise ConflictError if it is taken."""
    file = (folder / "lock").open("ab")  # held open until the store is closed
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConflictError(f"{folder}: another worker uses this folder; choose another one with --data") from None
    return file
