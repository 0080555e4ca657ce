"""The folders of training runs are removed with their jobs, and stay within a total size."""

from __future__ import annotations

from pathlib import Path

from inweave.serve.jobs.job import Submission
from inweave.serve.jobs.store import JobStore
from inweave.serve.storage.run_retention import expire_runs


class Clock:
    """A clock that tests advance."""

    now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def run_folder(folder: Path, name: str, size: int = 1000) -> Path:
    state = folder / name / "x-state" / "step-000001"
    state.mkdir(parents=True, exist_ok=True)
    (state / "state.safetensors").write_bytes(bytes(size))
    return folder / name


def ended(store: JobStore, *, run: str | None = None) -> str:
    job, _ = store.submit(Submission("train", "m", {"config": {}} | ({"run": run} if run else {})))
    assert store.claim() is not None
    store.finish(job.id, "done", result={})
    return job.id


def test_a_run_goes_with_its_last_job(tmp_path: Path) -> None:
    clock = Clock()
    store, training = JobStore(tmp_path, keep_seconds=100, clock=clock), tmp_path / "training"
    expire_runs(store, training, 10**6)  # there is none yet
    first = ended(store)
    clock.now += 90
    second = ended(store, run=first)
    waiting, _ = store.submit(Submission("train", "m", {"config": {}}))
    folders = [run_folder(training, name) for name in (first, waiting.id, "job-nobody")]
    clock.now += 20
    assert store.expire() == 1
    expire_runs(store, training, 10**6)
    assert [folder.exists() for folder in folders] == [True, True, False]  # the second job continues the first
    store.delete(second)
    expire_runs(store, training, 10**6)
    assert [folder.exists() for folder in folders] == [False, True, False]


def test_runs_that_ended_stay_within_a_size(tmp_path: Path) -> None:
    store, training = JobStore(tmp_path, clock=Clock()), tmp_path / "training"
    jobs = [ended(store) for _ in range(3)]
    waiting, _ = store.submit(Submission("train", "m", {"config": {}}))
    folders = [run_folder(training, name) for name in (*jobs, waiting.id)]
    expire_runs(store, training, 2500)
    assert [folder.exists() for folder in folders] == [False, True, True, True]
    expire_runs(store, training, 10)  # the last one may be extended, the waiting one is needed
    assert [folder.exists() for folder in folders] == [False, False, True, True]
    assert [store.job(job).expired for job in jobs] == [False] * 3  # results stay
