"""The system's clock jumps while the worker runs: nothing expires before its time, and the newest is kept first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from inweave.serve.jobs.clock import AgeClock, seconds_since_boot
from inweave.serve.jobs.job import Kind, Submission
from inweave.serve.jobs.store import JobStore
from inweave.serve.storage.run_retention import expire_runs
from inweave.serve.storage.uploads import UploadStore
from tests.serve.test_uploads import image_bytes

YEAR = 365 * 86_400.0


class Machine:
    """A machine whose clock is set, and on which time passes."""

    def __init__(self) -> None:
        self.time, self.since_boot = 1.7e9, 50.0

    def passes(self, seconds: float) -> None:
        self.time += seconds
        self.since_boot += seconds

    def set_by(self, seconds: float) -> None:
        self.time += seconds

    def put_into(self, store: JobStore | UploadStore) -> None:
        store._clock = lambda: self.time
        store._age_clock = AgeClock(lambda: self.time, lambda: self.since_boot)


def finished(store: JobStore, size: int = 1000, kind: Kind = "image_generation") -> str:
    job = store.submit(Submission(kind, "m", {}))[0].id
    store.claim()
    store.files.write(job, "0.png", bytes(size))
    store.finish(job, "done", result={"images": [{"file": "0.png"}]})
    return job


@pytest.mark.parametrize("jump", [YEAR, 5.0, -5.0, -YEAR])
def test_results_expire_after_the_time_that_passed_and_not_by_a_jump(jump: float, tmp_path: Path) -> None:
    machine, store = Machine(), JobStore(tmp_path, keep_seconds=100, keep_bytes=3500)
    machine.put_into(store)
    before = finished(store)
    machine.passes(50)
    machine.set_by(jump)
    assert store.expire() == 0
    after = [finished(store) for _ in range(2)]
    machine.passes(60)
    gone = store.expire()
    assert gone == int(jump > -10), "those before a jump back are kept longer"
    assert not any(store.job(job).expired for job in after)
    more = [finished(store) for _ in range(3)]
    store.expire()
    jobs = [before, *after, *more]
    assert [store.job(job).expired for job in jobs] == [True, True, True, False, False, False], "the newest stay"
    store.close()


@pytest.mark.parametrize("jump", [YEAR, -YEAR])
def test_uploads_survive_a_jump_and_the_one_that_is_used_is_kept(jump: float, tmp_path: Path) -> None:
    machine = Machine()
    uploads = UploadStore(tmp_path, keep_seconds=100.0, max_count=2, max_bytes=10**6)
    machine.put_into(uploads)
    first, second = (uploads.add(image_bytes()).id for _ in range(2))
    machine.set_by(jump)
    uploads.expire()
    assert uploads.read(first) and uploads.find(second)
    third = uploads.add(image_bytes()).id  # makes room: the one that was used longest ago goes
    assert uploads.find(third) and uploads.find(first)
    with pytest.raises(Exception, match="expired"):
        uploads.find(second)
    uploads.close()


def test_the_latest_training_run_is_kept_after_the_clock_went_back(tmp_path: Path) -> None:
    machine, store = Machine(), JobStore(tmp_path)
    machine.put_into(store)
    runs = []
    for _ in range(3):
        runs.append(finished(store, kind="train"))
        (tmp_path / "training" / runs[-1]).mkdir(parents=True)
        (tmp_path / "training" / runs[-1] / "state").write_bytes(bytes(1000))
        machine.set_by(-YEAR)
    expire_runs(store, tmp_path / "training", 2500)
    assert [(tmp_path / "training" / run).exists() for run in runs] == [False, True, True]
    store.close()


def test_the_steady_clock_runs_with_the_systems() -> None:
    ages, start = AgeClock(), seconds_since_boot()
    one = ages()
    time.sleep(0.02)
    assert 0.01 < ages() - one < 5 and seconds_since_boot() > start and abs(ages() - time.time()) < 5
