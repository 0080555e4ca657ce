"""Processes that are killed or stopped: no job is lost, runs without a reader, or ends twice."""

from __future__ import annotations

import io
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load

from tests.serve.worker import SMALL, Worker
from tests.support import figure, sized

ENDS = ("done", "failed", "cancelled")


@pytest.fixture(scope="module")
def own_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Yield a worker that the tests stop and kill; each test leaves it running."""
    running = Worker(tmp_path_factory.mktemp("own") / "data", "--drain-seconds", "2").start()
    yield running
    running.stop()


def kill_model(worker: Worker) -> None:
    for pid in worker.model_pids():
        os.kill(pid, signal.SIGKILL)


def restart_killed(worker: Worker) -> None:
    """Kill the web process with SIGKILL and restart it; its children must have ended with it."""
    children = worker.model_pids()
    worker.kill()
    worker.start(wait=False)
    worker.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 30)


def test_a_signal_drains_and_the_rest_waits_for_the_next_start(own_worker: Worker) -> None:
    """A job that ends within the grace period is done; a longer one is queued again as if it had not been started."""
    short = own_worker.submit(width=64, height=64, steps=3)
    key: dict[str, Any] = {"json": {"prompt": "a red apple", **SMALL}, "headers": {"Idempotency-Key": "over a restart"}}
    waiting = own_worker.http.post("/v1/jobs", **key).json()["id"]
    own_worker.running(short)
    started = time.monotonic()
    assert own_worker.stop() == 0
    figure(f"SIGTERM while a job runs: exit code 0 after {time.monotonic() - started:.1f} s of at most 2 s + 5 s")
    own_worker.start(wait=False)
    assert own_worker.http.post("/v1/jobs", **key).json()["id"] == waiting
    assert own_worker.job(short)["state"] in ("done", "queued", "running")  # not failed, not lost
    assert [own_worker.ended(job)["state"] for job in (short, waiting)] == ["done"] * 2
    assert [own_worker.job(job)["attempts"] for job in (short, waiting)] == [1, 1]
    long = own_worker.submit(steps=150)
    own_worker.running(long)
    assert own_worker.stop() == 0
    own_worker.start(wait=False)
    assert own_worker.job(long)["attempts"] == 0 and own_worker.job(long)["state"] == "queued"
    assert own_worker.http.delete(f"/v1/jobs/{long}").status_code == 200
    assert [event["type"] for event in own_worker.events(long)][-2:] == ["retried", "cancelled"]


def test_kills_at_any_moment_lose_nothing(own_worker: Worker) -> None:
    """Kills of either process while jobs wait; the queue is filled up again before every kill."""
    chance, queued = random.Random(5), sized(3, 20)
    own_worker.wait_ready()
    reference = own_worker.http.get(
        own_worker.ended(own_worker.submit(seed=11, **SMALL))["result"]["images"][0]["url"]
    ).content
    begun = time.monotonic()
    own_worker.ended(own_worker.submit(seed=11, **SMALL))
    jobs, kinds, ready = list[str](), Counter[str](), 10.0
    for number in range(sized(1, 50)):
        while own_worker.queued() < queued:
            jobs.append(own_worker.submit(seed=11, **SMALL))
        started = time.monotonic()
        if chance.random() < 0.7:  # while jobs run; otherwise while a process starts
            own_worker.wait_ready()
            ready = max(1.0, time.monotonic() - started)
            time.sleep(chance.uniform(0.0, 1.0))
        else:
            time.sleep(chance.uniform(0.0, ready))
        kind = ("web", "model")[number % 2]
        kinds[kind] += 1
        if kind == "web":
            restart_killed(own_worker)
        else:
            kill_model(own_worker)
    own_worker.wait_ready()
    states: Counter[str] = Counter()
    for job in jobs:
        document = own_worker.ended(job, 300)
        states[document["state"]] += 1
        events = list(own_worker.events(job))
        assert [event["event"] for event in events] == list(range(1, len(events) + 1))
        assert [event["type"] for event in events if event["type"] in ENDS] == [document["state"]]
        if document["state"] == "done":
            assert own_worker.http.get(document["result"]["images"][0]["url"]).content == reference
        else:
            assert document["error"]["code"] in ("worker_crashed", "worker_restarted") and document["attempts"] == 2
    assert not list(own_worker.data.rglob("*.part"))
    figure(
        f"{sum(kinds.values())} kills ({dict(kinds)}) with {queued} jobs queued: {len(jobs)} jobs, {dict(states)}, "
        f"none lost, "
        f"none ended twice, {time.monotonic() - begun:.0f} s"
    )


def test_a_job_that_kills_its_process_twice_fails_with_the_reason(own_worker: Worker) -> None:
    job = own_worker.submit(steps=150)
    for attempt in (1, 2):
        own_worker.running(job, attempt)
        kill_model(own_worker)
    ended = own_worker.ended(job)
    assert ended["state"] == "failed" and ended["error"]["code"] == "worker_crashed" and ended["attempts"] == 2
    assert "2 times" in ended["error"]["message"]
    assert own_worker.http.get("/health").status_code == 200


def two_images(worker: Worker) -> str:
    """Create a dataset that takes almost no time to train on."""
    dataset = str(worker.http.post("/v1/datasets", json={"name": "two"}).json()["id"])
    for color in ("red", "green"):
        content = io.BytesIO()
        Image.new("RGB", (64, 64), color).save(content, format="PNG")
        worker.http.put(f"/v1/datasets/{dataset}/pictures/{color}.png", content=content.getvalue())
        worker.http.put(f"/v1/datasets/{dataset}/captions/{color}", json={"caption": f"a {color} square"})
    return dataset


def start_training(worker: Worker, dataset: str, name: str, **settings: Any) -> str:
    settings = {"steps": 6, "rank": 2, "log_every": 1, "seed": 4, "resolution": 64, "batch_size": 1, **settings}
    body = {"operation": "train", "dataset": dataset, "name": name, "settings": settings}
    answer = worker.http.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def until_step(worker: Worker, job: str, step: int) -> None:
    for event in worker.events(job):
        assert event["type"] not in ENDS, event
        if event["type"] == "progress" and event["step"] >= step:
            return


def trained_bits(worker: Worker, job: str) -> dict[str, bytes]:
    """Return the tensors of the adapter that a train job added to the library."""
    ended = worker.ended(job)
    assert ended["state"] == "done", ended["error"]
    content = worker.http.get(f"/v1/loras/{ended['result']['adapter']['id']}/file").content
    return {name: tensor.numpy().tobytes() for name, tensor in load(content).items()}


def resumed_from(worker: Worker, job: str) -> list[int]:
    texts = [event["text"] for event in worker.events(job) if event["type"] == "resumed"]
    assert not any("/" in text for text in texts), "a folder of the machine"
    return [int(text.removeprefix("from step ")) for text in texts if text.startswith("from step ")]


@pytest.mark.full  # tests/serve/test_training_resume.py is the sample
def test_training_that_is_interrupted_ends_with_the_bits_of_a_run_that_was_not(own_worker: Worker) -> None:
    own_worker.wait_ready()
    dataset = two_images(own_worker)
    expected = trained_bits(own_worker, start_training(own_worker, dataset, "straight"))
    assert len(expected) > 10 and any(any(bits) for bits in expected.values())
    for interruption in ("model killed", "worker killed", "worker stopped"):
        stopped = interruption == "worker stopped"
        job = start_training(own_worker, dataset, interruption.replace(" ", "-"), save_every=0 if stopped else 2)
        until_step(own_worker, job, 3)
        if interruption == "model killed":
            kill_model(own_worker)
        elif interruption == "worker killed":
            restart_killed(own_worker)
        else:
            assert own_worker.stop() == 0
            own_worker.start(wait=False)
            assert own_worker.job(job)["attempts"] == 0  # put back as if it had not been started
        assert trained_bits(own_worker, job) == expected
        assert own_worker.job(job)["attempts"] == (1 if stopped else 2)
        (step,) = resumed_from(own_worker, job)
        assert step >= 3 if stopped else step in (2, 4)
        figure(f"{interruption} in a training run: it resumed from step {step} of 6 and has the same bits")
