"""Two web processes on one queue in PostgreSQL: killed, stopped, cut off from the database; a job ends once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.postgres import Postgres
from tests.serve.test_crashes import kill_model, start_training, trained_bits, two_images
from tests.serve.worker import SMALL, Worker
from tests.support import figure

ENDS = ("done", "failed", "cancelled")
LEASE = 3.0
KILLS = 60
#: takes seconds, so that something can happen meanwhile
LONG: dict[str, Any] = {"steps": 40, "width": 64, "height": 64, "seed": 3}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[tuple[Worker, Worker]]:
    """Yield two workers of one queue; only the last test leaves one of them dead."""
    folder = tmp_path_factory.mktemp("pair")
    options = ("--store", postgres.database("pair"), "--blobs", str(folder / "shared"), "--lease-seconds", str(LEASE))
    one, two = (Worker(folder / name, *options, "--drain-seconds", "2").start(wait=False) for name in ("one", "two"))
    for each in (one, two):
        each.wait_ready()
    yield one, two
    for each in (one, two):
        each.stop()


def holder(pair: tuple[Worker, Worker], job: str, seconds: float = 60) -> tuple[Worker, Worker]:
    """Return (the worker that runs a job, the other one), once it runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for each, other in (pair, pair[::-1]):
            if any(device["job"] == job for device in each.http.get("/v1/queue").json()["devices"]):
                return each, other
        time.sleep(0.02)
    raise AssertionError(f"{job} does not run: {pair[0].job(job)}")


def ends_once(worker: Worker, job: str) -> list[dict[str, Any]]:
    """Return the events of a job that ended; they are numbered without a gap, and the end is the last one."""
    events = list(worker.events(job))
    assert [event["event"] for event in events] == list(range(1, len(events) + 1))
    assert [event["type"] for event in events if event["type"] in ENDS] == [worker.job(job)["state"]]
    assert events[-1]["type"] in ENDS
    return events


def test_jobs_of_either_worker_run_once_and_both_show_them(pair: tuple[Worker, Worker]) -> None:
    key = {"Idempotency-Key": "of both"}
    body = {"prompt": "a red apple", "seed": 5, **SMALL}
    same = {each.http.post("/v1/jobs", json=body, headers=key).json()["id"] for each in pair}
    assert len(same) == 1
    jobs = [each.submit(seed=5, **SMALL) for _ in range(4) for each in pair]
    images = set()
    for job in (*same, *jobs):
        for each in pair:
            ended = each.ended(job)
            assert (ended["state"], ended["attempts"]) == ("done", 1)
            images.add(each.http.get(ended["result"]["images"][0]["url"]).content)
        assert ends_once(pair[0], job) == ends_once(pair[1], job)
    assert len(images) == 1
    listed = [[job["id"] for job in each.http.get("/v1/jobs", params={"limit": 9}).json()["jobs"]] for each in pair]
    assert listed[0] == listed[1] == [*reversed(jobs), *same]


def test_uploads_and_the_pause_of_a_queue_concern_both(pair: tuple[Worker, Worker]) -> None:
    from tests.serve.test_uploads import image_bytes, send

    one, two = pair
    upload = send(one, image_bytes())
    assert one.http.post("/v1/queue", json={"paused": True}).status_code == 200
    job = two.submit(operation="image_transform", input_image=upload, strength=0.5, **SMALL)
    time.sleep(0.3)
    assert two.job(job)["state"] == "queued" and two.http.get("/v1/queue").json()["paused"]
    two.http.post("/v1/queue", json={"paused": False})
    assert one.ended(job)["state"] == "done"


def test_a_lora_that_one_worker_received_a_moment_ago_is_used_by_the_other(pair: tuple[Worker, Worker]) -> None:
    """Each worker has its own index of the library."""
    content = pair[0].http.get("/v1/loras/pixel/file").content
    assert pair[0].http.post("/v1/loras", params={"name": "fresh"}, content=content).status_code == 201
    uploaded = pair[0].http.get("/v1/loras/fresh").json()
    pair[1].until(lambda: pair[1].http.get(f"/v1/loras/{uploaded['id']}").status_code == 200, 10)
    jobs = [pair[0].submit(loras=[{"name": name}], **SMALL) for _ in range(3) for name in ("fresh", "pixel", "ink")]
    ended = [pair[1].ended(job) for job in jobs]
    assert [(each["state"], each["error"]) for each in ended] == [("done", None)] * 9
    hashes = [each["result"]["loras"][0]["sha256"] for each in ended]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_reader_follows_and_cancels_a_job_that_the_other_worker_runs(pair: tuple[Worker, Worker]) -> None:
    job = pair[0].submit(**LONG | {"steps": 150, "width": 128, "height": 128})
    here, there = holder(pair, job)
    steps, cancelled = [], 0.0
    for event in there.events(job):
        if event["type"] == "progress":
            steps.append(event["step"])
            if len(steps) == 5:
                cancelled = time.monotonic()
                assert there.http.delete(f"/v1/jobs/{job}").status_code == 200
    figure(f"cancelled through the other worker: ended after {1000 * (time.monotonic() - cancelled):.0f} ms")
    assert steps == [*range(steps[0], steps[-1] + 1)] and steps[-1] < 150
    assert here.job(job)["state"] == "cancelled" and ends_once(there, job)


def test_a_worker_that_was_stopped_beyond_its_lease_finishes_nothing_twice(pair: tuple[Worker, Worker]) -> None:
    job = pair[0].submit(**LONG)
    here, there = holder(pair, job)
    os.kill(here.process.pid, signal.SIGSTOP)
    try:
        assert there.ended(job)["state"] == "done"
        image = there.http.get(there.job(job)["result"]["images"][0]["url"]).content
        before = ends_once(there, job)
    finally:
        os.kill(here.process.pid, signal.SIGCONT)
    last = here.submit(**SMALL)  # the worker that returned works on, once it has dropped what it ran
    here.until(lambda: all(device["job"] != job for device in here.http.get("/v1/queue").json()["devices"]), 60)
    assert here.ended(last)["state"] == "done"
    assert ends_once(here, job) == before and here.job(job)["attempts"] == 2
    assert here.http.get(here.job(job)["result"]["images"][0]["url"]).content == image
    assert len(list((here.data.parent / "shared" / "files" / job).glob("[0-9]*"))) <= 2


@pytest.mark.parametrize("mode", ["fast", pytest.param("immediate", marks=pytest.mark.full)])
def test_a_restart_of_the_database_loses_nothing(pair: tuple[Worker, Worker], postgres: Postgres, mode: str) -> None:
    jobs = [pair[0].submit(**LONG), *(each.submit(**SMALL) for _ in range(2) for each in pair)]
    holder(pair, jobs[0])
    reader = pair[1].numbered_events(jobs[0])
    next(reader)
    postgres.restart(mode)
    numbers = [number for number, _ in reader]  # the stream goes on
    assert numbers == [*range(2, numbers[-1] + 1)]
    for job in jobs:
        ended = pair[1].ended(job)
        assert (ended["state"], ended["attempts"]) == ("done", 1), ended
        ends_once(pair[0], job)


def test_the_jobs_of_a_killed_worker_run_at_the_other_one(pair: tuple[Worker, Worker]) -> None:
    job = pair[0].submit(**LONG)
    here, there = holder(pair, job)
    here.kill()
    killed = time.monotonic()
    assert there.ended(job)["state"] == "done"
    figure(f"kill -9: the job has run at the other worker after {time.monotonic() - killed:.1f} s, lease {LEASE:g} s")
    types = [event["type"] for event in ends_once(there, job)]
    assert types.count("started") == 2 and types.count("retried") == 1


def accepted(pair: tuple[Worker, Worker], path: str, body: dict[str, Any]) -> str:
    """Submit until a worker accepts: with a key, so that an answer that was lost makes no second job."""
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for each in pair:
            with contextlib.suppress(httpx.TransportError):
                answer = each.http.post(path, json=body, headers=headers)
                if answer.status_code == 202:
                    return str(answer.json()["id"])
                assert answer.status_code == 503, answer.text
        time.sleep(0.2)
    raise AssertionError(f"nobody accepts: {pair[0].log()}")


def result_bits(worker: Worker, job: str) -> dict[str, bytes]:
    adapter = worker.ended(job, 600)["result"]["adapter"]["id"]
    worker.until(lambda: worker.http.get(f"/v1/loras/{adapter}").status_code == 200, 70)
    return trained_bits(worker, job)


def strike(pair: tuple[Worker, Worker], postgres: Postgres, kind: str, chance: random.Random) -> None:
    one = chance.choice(pair)
    if kind == "web":
        one.kill()
        one.start(wait=False)
    elif kind == "model":
        kill_model(one)
    elif kind == "database":
        postgres.restart(chance.choice(["fast", "immediate"]))
    else:
        os.kill(one.process.pid, signal.SIGSTOP)
        time.sleep(chance.uniform(0.5, 2.5) * LEASE)
        os.kill(one.process.pid, signal.SIGCONT)


@pytest.mark.full
def test_kills_of_any_process_lose_nothing(pair: tuple[Worker, Worker], postgres: Postgres) -> None:
    for each in pair:
        if each.process.poll() is not None:
            each.start(wait=False)
    chance, begun = random.Random(11), time.monotonic()
    pair[0].wait_ready()
    small = {"prompt": "a red apple", "seed": 11, **SMALL}
    first = pair[0].ended(accepted(pair, "/v1/jobs", small))
    reference = pair[0].http.get(first["result"]["images"][0]["url"]).content
    dataset = two_images(pair[0])
    straight = start_training(pair[0], dataset, "straight", steps=12)
    expected = result_bits(pair[0], straight)
    training = [start_training(pair[0], dataset, name, steps=12, save_every=2) for name in ("one", "two")]
    jobs, kinds = list[str](), Counter[str]()
    for number in range(KILLS):
        jobs += [accepted(pair, "/v1/jobs", small) for _ in range(20 - pair[0].queued())]
        kind = ("web", "model", "database", "stop")[number % 4]
        strike(pair, postgres, kind, chance)
        kinds[kind] += 1
        for each in pair:
            each.until(lambda each=each: each.http.get("/v1/queue").status_code == 200)  # type: ignore[misc]
        time.sleep(chance.uniform(0.0, 4.0))
    states: Counter[str] = Counter()
    for job in jobs:
        ended = pair[0].ended(job, 600)
        states[ended["state"]] += 1
        ends_once(pair[0], job)
        if ended["state"] == "done":
            assert pair[1].http.get(ended["result"]["images"][0]["url"]).content == reference
        else:
            assert ended["error"]["code"] in ("worker_crashed", "worker_restarted", "worker_lost"), ended["error"]
            assert ended["attempts"] == 2
    resumed = 0
    for job in training:
        while (ended := pair[0].ended(job, 600))["state"] == "failed":
            assert ended["attempts"] == 2, ended["error"]
            ends_once(pair[0], job)
            job, resumed = pair[0].http.post(f"/v1/jobs/{job}/retry").json()["id"], resumed + 1
        assert result_bits(pair[0], job) == expected
    figure(
        f"{sum(kinds.values())} strikes ({dict(kinds)}): {len(jobs)} jobs, {dict(states)}, none lost, none ended "
        f"twice; 2 training runs with the same bits ({resumed} resumed by hand), {time.monotonic() - begun:.0f} s"
    )
