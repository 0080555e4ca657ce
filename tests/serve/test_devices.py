"""A worker with several devices: one process each, one queue."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.serve.scheduler.device import device_names, threads_each
from inweave.serve.settings import ServeSettings
from tests.serve.worker import SMALL, Worker


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    running = Worker(tmp_path_factory.mktemp("pair") / "data", "--devices", "cpu,cpu", "--log-level", "info").start()
    running.until(lambda: all(each["status"] == "ready" for each in devices_of(running)))
    yield running
    running.stop()


def devices_of(worker: Worker) -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = worker.http.get("/v1/queue").json()["devices"]
    return devices


def test_two_devices_share_a_queue_and_one_that_dies_takes_nothing_with_it(pair: Worker) -> None:
    long = pair.submit(steps=100, width=128, height=128, count=16)
    pair.running(long)
    short = [pair.submit(**SMALL, seed=seed) for seed in range(3)]
    assert [pair.ended(each)["state"] for each in short] == ["done"] * 3, "they run while the long job runs"
    first, second = devices_of(pair)
    assert {first["name"], second["name"]} == {"cpu#1", "cpu#2"}
    assert [each["job"] for each in (first, second)].count(long) == 1
    pids = pair.model_pids()
    assert len(pids) == 2
    pair.http.delete(f"/v1/jobs/{long}")
    pair.ended(long)

    running = [pair.submit(steps=30, width=128, height=128, seed=seed) for seed in range(2)]
    for each in running:
        pair.running(each)
    os.kill(pids[0], signal.SIGKILL)
    waiting = pair.submit(**SMALL)
    ends = {each: pair.ended(each) for each in (*running, waiting)}
    assert {end["state"] for end in ends.values()} == {"done"}
    assert sorted(ends[each]["attempts"] for each in running) == [1, 2], "one died and was run again"
    pair.until(lambda: len(pair.model_pids()) == 2)


def test_a_job_meets_the_device_that_holds_its_lora(pair: Worker) -> None:
    pair.until(lambda: all(each["status"] == "ready" and each["job"] is None for each in devices_of(pair)))
    for _ in range(4):
        assert pair.ended(pair.submit(**SMALL, loras=[{"name": "pixel"}]))["state"] == "done"
    assert sorted(each["adapters"] for each in devices_of(pair)) == [0, 1], "one device holds it and ran all of them"
    assert all(each["models"] == ["inweave/emoji"] for each in devices_of(pair))


def test_a_waiting_job_says_why(pair: Worker) -> None:
    pair.http.post("/v1/queue", json={"paused": True})
    job = pair.submit(**SMALL)
    (waiting,) = pair.http.get("/v1/queue").json()["waiting"]
    assert (waiting["id"], waiting["reason"]) == (job, "the queue is paused")
    pair.http.post("/v1/queue", json={"paused": False})
    assert pair.ended(job)["state"] == "done"


def test_devices_have_names_threads_and_roles() -> None:
    assert device_names(()) == ["the device"]
    assert device_names(("cuda:0", "cpu", "cpu")) == ["cuda:0", "cpu#1", "cpu#2"]
    assert threads_each(("cuda:0", "cpu")) is None
    assert threads_each(("cpu",) * 1000) == 1
    for options, problem in (
        ({"devices": ("cuda:0", "cuda:0")}, "cuda:0 is named twice"),
        ({"devices": ("cuda:0",), "train_devices": ("cuda:1",)}, "cuda:1 is not one of the devices"),
        ({"devices": ("cuda:0",), "train_devices": ("cuda:0",)}, "no device is left to make images"),
    ):
        with pytest.raises(ConfigError, match=problem):
            ServeSettings(**options)
