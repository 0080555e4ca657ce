"""Processes that are killed: no job is lost, none runs into the void, none ends twice."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.serve.worker import Worker
from tests.support import sized


@pytest.fixture
def own_worker(tmp_path: Path):  # type: ignore[no-untyped-def]
    running = Worker(tmp_path / "data", "--drain-seconds", "5").start()
    yield running
    if running.process is not None and running.process.poll() is None:
        running.stop()


def test_kills_at_any_moment_lose_nothing(own_worker: Worker) -> None:
    chance = random.Random(5)
    reference = own_worker.http.get(own_worker.ended(own_worker.submit(seed=11))["result"]["images"][0]["url"]).content
    jobs = [own_worker.submit(seed=11) for _ in range(sized(3, 20))]
    for round_number in range(sized(2, 50)):
        time.sleep(chance.uniform(0.0, 1.5))
        if round_number % 2:
            for pid in own_worker.model_pids():
                os.kill(pid, signal.SIGKILL)
        else:
            children = own_worker.model_pids()
            own_worker.kill()
            own_worker.start(wait=False)
            deadline = time.monotonic() + 30
            while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not [pid for pid in children if Path(f"/proc/{pid}").exists()], "a model process outlived its parent"
    own_worker.wait_ready()
    for job in jobs:
        document = own_worker.ended(job, 180)
        ends = [event["type"] for event in own_worker.events(job) if event["type"] in ("done", "failed", "cancelled")]
        assert ends == [document["state"]]
        if document["state"] == "done":
            assert own_worker.http.get(document["result"]["images"][0]["url"]).content == reference
        else:
            assert document["error"]["code"] in ("worker_crashed", "worker_restarted") and document["attempts"] == 2
    assert not list(own_worker.data.rglob("*.part"))


def test_a_signal_drains_and_the_rest_waits_for_the_next_start(own_worker: Worker) -> None:
    jobs = [own_worker.submit(steps=4) for _ in range(3)]
    while own_worker.job(jobs[0])["state"] == "queued":
        time.sleep(0.02)
    assert own_worker.stop() == 0
    own_worker.start(wait=False)
    assert own_worker.job(jobs[0])["state"] == "done"
    assert [own_worker.ended(job)["state"] for job in jobs] == ["done"] * 3
    assert all(own_worker.job(job)["attempts"] == 1 for job in jobs)
