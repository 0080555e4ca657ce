"""Training runs on disk, from which paused, failed and extended jobs continue.

    <data>/training/<run>/<name>-000050.safetensors     the adapter of a checkpoint, ready to be used
    <data>/training/<run>/<name>-state/step-000050/     the state that training resumes from
    <data>/training/<run>/<name>.jsonl, samples/        the log and the samples so far
    <data>/training/<run>/lease                         of the attempt that may write here; see `jobs.attempts`

A run is named after its first job. A job that resumes or extends it has that name in its request.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, ConflictError, FormatError, MissingError
from inweave.files.writing import write_atomic
from inweave.formats.files import read_header
from inweave.serve.jobs.job import Job, Submission

CHUNK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The adapter of one step."""

    step: int
    path: Path

    @property
    def bytes(self) -> int:
        """The size of the file."""
        return self.path.stat().st_size


def run_of(job: Job) -> str:
    """Return the name of the run that a job belongs to."""
    return str(job.request.get("run", job.id))


def resumed_request(job: Job) -> dict[str, Any]:
    """Return the request of a job like this one: an unfinished run is resumed, a finished one is trained again."""
    request = {name: value for name, value in job.request.items() if name != "run"}
    return request if job.state == "done" else {**request, "run": run_of(job)}


def checkpoints_in(folder: Path, name: str) -> list[Checkpoint]:
    """Return the adapters that a run has written so far, oldest first; a file has its name only once it is complete."""
    pattern = re.compile(re.escape(name) + r"-(\d{6,})\.safetensors")
    paths = folder.iterdir() if folder.is_dir() else ()
    matches = [(match, path) for path in paths if (match := pattern.fullmatch(path.name))]
    return sorted((Checkpoint(int(match[1]), path) for match, path in matches), key=lambda each: each.step)


def is_taken(folder: Path, lease: str) -> bool:
    """Return whether another attempt writes into the folder of a run now; ``lease``: of this one."""
    try:
        return lease != "" and (folder / "lease").read_text() != lease
    except FileNotFoundError:
        return False


class TrainingRuns:
    """The runs of a worker, below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def nowhere(self) -> Path:
        """A folder for the plan of a run that has none; it is never created."""
        return self._folder / "none"

    def folder(self, job: Job) -> Path:
        """Return the output folder of a train job."""
        return self._folder / run_of(job)

    def take(self, job: Job) -> Path:
        """Return the output folder of an attempt, and keep any earlier one from writing there."""
        folder = self.folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "lease", [(job.lease or "").encode()])
        return folder

    def take_over(self, job: Job, seconds: float = 0.0) -> None:
        """Free the folder of a run from a process on a machine that was lost, which may still have it open.

        A process that runs sees within ``seconds`` that the folder was taken, and ends. A machine that was stopped
        keeps its locks, and would append to the log when it comes back. So the files that are open there get new ones
        in their place.
        """
        folder = self.folder(job)
        deadline = time.monotonic() + seconds
        while any(map(_is_locked, folder.rglob(".lock"))) and time.monotonic() < deadline:
            time.sleep(0.1)
        for lock in folder.rglob(".lock"):
            lock.unlink(missing_ok=True)
        for log in folder.glob("*.jsonl"):
            copy = log.with_name(f".{log.name}.part")
            shutil.copyfile(log, copy)
            copy.replace(log)

    def checkpoints(self, job: Job) -> list[Checkpoint]:
        """Return the adapters of a job's run; none if they have expired."""
        return checkpoints_in(self.folder(job), job.request["config"]["name"])

    def checkpoint(self, job: Job, step: int) -> Checkpoint:
        """Return the adapter of one step; raise MissingError if there is none."""
        for each in self.checkpoints(job):
            if each.step == step:
                return each
        steps = ", ".join(str(each.step) for each in self.checkpoints(job)) or "none"
        raise MissingError(f"job {job.id} has no checkpoint of step {step}; it has {steps}")

    def extend(self, job: Job, steps: int) -> Submission:
        """Return a submission that trains the run of a finished or paused job up to ``steps`` steps."""
        if job.expired or not job.final:
            raise ConflictError(
                f"job {job.id} is {'expired' if job.expired else job.state}; only runs that ended can be extended"
            )
        if not any(self.folder(job).glob("*-state/step-*")):
            raise ConflictError(
                f"job {job.id}: its checkpoints are gone; train a new LoRA that starts from its last one (start_from)"
            )
        done = int((job.result or {}).get("steps", 0))
        if steps <= done:
            raise ConfigError(f"steps: {done} steps are done already; choose more than that, got {steps}")
        config = {name: value for name, value in job.request["config"].items() if name != "epochs"} | {"steps": steps}
        request = {**job.request, "config": config, "run": run_of(job)}
        return Submission(job.kind, job.model, request, {}, job.priority, job.client)


def _is_locked(path: Path) -> bool:
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _free(name: str) -> bool:
    return False


def add_to_library(source: Path, folder: Path, stem: str, is_taken: Callable[[str], bool] = _free) -> Path:
    """Copy an adapter into a folder of the library and return its path; a file with the same tensors is used again.

    A job that is killed after this and run again writes the same tensors with another time in the metadata.
    """
    for known in sorted(folder.glob(f"{stem}*.safetensors")):
        if cmp(source, known, shallow=False) or _same_tensors(source, known):
            return known
    hidden = folder / f".{stem}-{secrets.token_hex(8)}.part"
    try:
        shutil.copyfile(source, hidden)
        return move_to_free_name(hidden, folder, stem, is_taken)
    finally:
        hidden.unlink(missing_ok=True)


def add_preview(adapter: Path, copy: Path) -> None:
    """Put the sample image closest to an adapter of a run beside its copy in the library, as its preview."""
    image = _closest_sample(adapter)
    if image is not None and not preview_path(copy).exists():
        write_atomic(preview_path(copy), [image.read_bytes()])


def preview_path(adapter: Path) -> Path:
    """Return the path of the preview image of an adapter file."""
    return adapter.with_name(f"{adapter.stem}.preview.png")


def _closest_sample(adapter: Path) -> Path | None:
    """Return the first sample of the step closest to that of an adapter, the last one's for the final adapter."""
    own = re.fullmatch(r"(.+)-(\d{6,})", adapter.stem)
    name, step = (own[1], int(own[2])) if own else (adapter.stem, sys.maxsize)
    samples = {}
    for path in (adapter.parent / "samples").glob(f"{name}-*.png"):
        if match := re.fullmatch(rf"{re.escape(name)}-(\d+)-(\d+)", path.stem):
            samples[-abs(int(match[1]) - step), -int(match[2])] = path
    return samples[max(samples)] if samples else None


def _same_tensors(one: Path, other: Path) -> bool:
    """Return whether two files differ in their metadata alone."""
    try:
        headers = [read_header(path) for path in (one, other)]
    except FormatError:
        return False
    if headers[0].spans != headers[1].spans:
        return False
    with one.open("rb") as first, other.open("rb") as second:
        first.seek(headers[0].data_start)
        second.seek(headers[1].data_start)
        while content := first.read(CHUNK):
            if content != second.read(len(content)):
                return False
        return not second.read(1)


def move_to_free_name(source: Path, folder: Path, stem: str, is_taken: Callable[[str], bool] = _free) -> Path:
    """Move a file of the same disk; another process may take the same name at the same time."""
    while True:
        target = free_name(folder, stem, is_taken)
        try:
            os.link(source, target)
        except FileExistsError:
            continue
        except OSError:  # a file system without links
            return source.replace(target)
        source.unlink()
        return target


def free_name(folder: Path, stem: str, is_taken: Callable[[str], bool] = _free) -> Path:
    """Return a free path for a LoRA called ``stem``, with a number if it ``is_taken``, in this or another folder."""
    name, number = stem, 2
    while (folder / f"{name}.safetensors").exists() or is_taken(name):
        name, number = f"{stem}-{number}", number + 1
    return folder / f"{name}.safetensors"
