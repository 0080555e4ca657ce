"""The folder of a training run whose machine was lost: another runner continues in it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from inweave.errors import ConfigError, ConflictError
from inweave.serve import service as service_module
from inweave.serve.jobs.job import Submission
from inweave.serve.jobs.store import JobStore
from inweave.serve.jobs.training_runs import TrainingRuns
from inweave.serve.service import Service
from inweave.serve.settings import ServeSettings
from inweave.training.checkpoint.store import lock


def test_a_process_that_holds_the_run_open_keeps_nobody_out_and_writes_to_no_file_of_it(tmp_path: Path) -> None:
    store, runs = JobStore(tmp_path / "data"), TrainingRuns(tmp_path / "training")
    job, _ = store.submit(Submission("train", "m", {"config": {"name": "mine"}}))
    state, log = runs.folder(job) / "mine-state", runs.folder(job) / "mine.jsonl"
    state.mkdir(parents=True)
    with lock(state), log.open("a") as stopped:
        stopped.write("1\n")
        stopped.flush()
        with pytest.raises(ConfigError, match="another process is training this run"):
            lock(state)
        runs.take_over(job)
        with lock(state), pytest.raises(ConfigError, match="another process"):
            lock(state)
        stopped.write("2\n")
    assert log.read_text() == "1\n"
    assert sorted(path.name for path in runs.folder(job).iterdir()) == ["mine-state", "mine.jsonl"]
    store.close()


def test_a_process_that_still_trains_has_time_to_end_by_itself(tmp_path: Path) -> None:
    """Its lock is not replaced while it may write: it sees the new lease, and ends."""
    store, runs = JobStore(tmp_path / "data"), TrainingRuns(tmp_path / "training")
    job, _ = store.submit(Submission("train", "m", {"config": {"name": "mine"}}))
    state = runs.folder(job) / "mine-state"
    state.mkdir(parents=True)
    file = lock(state)
    threading.Timer(0.5, file.close).start()
    begun = time.monotonic()
    runs.take_over(job, 30.0)
    assert 0.4 < time.monotonic() - begun < 10
    store.close()


@pytest.mark.parametrize("cluster", [False, True])
def test_a_worker_starts_training_in_a_folder_that_a_stopped_one_holds(
    cluster: bool, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "RELEASE_SECONDS", 0.2)
    monkeypatch.setattr(service_module, "LEASE", 0.0)
    service = Service.open(
        ServeSettings(
            data=tmp_path / "one", store=address, blobs=tmp_path / "shared", cluster="127.0.0.1:1" if cluster else None
        )
    )
    request = {"config": {"name": "mine"}, "dataset": "inweave/ink"}
    first, _ = service.store.submit(Submission("train", "inweave/emoji", request))
    job = service.store.claim()
    assert job is not None and job.id == first.id
    state = tmp_path / "shared" / "training" / job.id / "mine-state"
    state.mkdir(parents=True)
    with lock(state):
        service._resolve(job)
        lock(state).close()
    holder = (state.parent / "lease").read_text()
    service.store.put_back(job.id, lease=job.lease)
    with pytest.raises(ConflictError, match="runs elsewhere"):
        service._resolve(job)
    assert (state.parent / "lease").read_text() == holder
    service.library.close()
    service.store.close()
