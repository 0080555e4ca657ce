"""Retention of training runs: a folder stays as long as a job that may continue it, within a total size.

A run is removed with its last job. Of the finished runs, the latest stay within ``keep_bytes``, and the very last one
regardless of its size: a run takes gigabytes and its job takes none, so the job should not expire because of it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from inweave.serve.jobs.job import Job
from inweave.serve.jobs.store import JobStore
from inweave.serve.jobs.training_runs import run_of


def expire_runs(store: JobStore, folder: Path, keep_bytes: int) -> None:
    """Remove the folders of runs that no job continues, and of the oldest finished ones beyond ``keep_bytes``."""
    if not folder.is_dir():
        return
    folders = list(folder.iterdir())  # listed before the jobs, so that a run that begins meanwhile is not seen at all
    runs: dict[str, list[Job]] = {}
    for job in store.jobs(kind="train", limit=1_000_000):
        runs.setdefault(run_of(job), []).append(job)
    ended = []
    for path in folders:
        jobs = runs.get(path.name)
        if jobs is None:
            shutil.rmtree(path, ignore_errors=True)
        elif all(job.final for job in jobs):
            ended.append(path)
    total = 0
    newest = list(runs)  # the latest first, in the order of submission: the system's clock may have gone back
    for place, path in enumerate(sorted(ended, key=lambda path: newest.index(path.name))):
        total += sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        if total > keep_bytes and place > 0:
            shutil.rmtree(path, ignore_errors=True)
