"""The folder of a training run whose machine was lost: another runner continues in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from inweave.errors import ConfigError
from inweave.serve.jobs.job import Submission
from inweave.serve.jobs.store import JobStore
from inweave.serve.jobs.training_runs import TrainingRuns
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
