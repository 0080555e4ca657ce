"""What runs out: the queue, the disk, the patience with a job that kills its process. Each ends in an answer."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator

import pytest

from tests.serve.worker import Worker


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker with room for one waiting job, started with rbee's flags."""
    data = tmp_path_factory.mktemp("small") / "data"
    flags = ("--worker-id", "w7", "--callback-url", "http://x", "--backend", "cpu", "--use-flash-attn", "--local-mode")
    running = Worker(data, "--queue-limit", "1", "--drain-seconds", "1", *flags).start()
    yield running
    running.stop()


def pause(worker: Worker, paused: bool) -> None:
    assert worker.http.post("/v1/queue", json={"paused": paused}).json() == {"paused": paused}


def test_flags_of_rbee_are_taken(small: Worker) -> None:
    info = small.http.get("/info").json()
    assert info["id"] == "w7" and info["status"] == "ready" and info["model_id"] == "inweave/emoji"
    assert 'inweave_jobs{state="queued"}' in small.http.get("/metrics").text


def test_a_full_queue_is_429_in_the_words_of_each_face(small: Worker) -> None:
    pause(small, True)
    job = small.submit(steps=1)
    assert small.http.get("/internal/pending-tasks").json() == {"size": 1, "tasks": [job]}
    progress = small.http.post("/internal/progress", json={"id_task": job}).json()
    assert progress["queued"] and not progress["active"] and progress["textinfo"] == "In queue: 1/1"
    answers = [
        small.http.post(path, json={"prompt": "x"})
        for path in ("/v1/jobs", "/v1/images/generations", "/sdapi/v1/txt2img")
    ]
    assert [answer.status_code for answer in answers] == [429] * 3
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in answers)
    native, openai, a1111 = (answer.json() for answer in answers)
    assert native["error"]["code"] == "busy" and "message" in native["error"]
    assert {"message", "type", "param", "code"} <= set(openai["error"])
    assert a1111["error"] == "busy" and "full" in a1111["detail"]
    pause(small, False)
    assert small.ended(job)["state"] == "done"
    assert small.http.post("/internal/progress", json={"id_task": job}).json()["completed"]
    url = small.job(job)["result"]["images"][0]["url"]
    assert small.http.delete(f"/v1/jobs/{job}", params={"forget": True}).status_code == 200
    for path in (f"/v1/jobs/{job}", url, f"/v1/jobs/{job}/events", f"/v1/jobs/{job}/stream"):
        assert small.http.get(path).status_code == 410


def running(worker: Worker, job: str, attempts: int) -> None:
    deadline = time.monotonic() + 60
    while (document := worker.job(job))["state"] != "running" or document["attempts"] < attempts:
        assert time.monotonic() < deadline, document
        time.sleep(0.02)


def test_a_disk_that_fills_up_fails_the_job_and_nothing_else(small: Worker) -> None:
    assert small.process is not None
    before = resource.prlimit(small.process.pid, resource.RLIMIT_FSIZE)
    job = small.submit(steps=150)
    running(small, job, 1)
    resource.prlimit(small.process.pid, resource.RLIMIT_FSIZE, (1024, before[1]))
    answer = small.http.post("/v1/jobs", json={"prompt": "x"})
    assert answer.status_code == 507 and answer.json()["error"]["code"] == "storage"
    time.sleep(0.5)
    assert small.http.get("/health").status_code == 200
    resource.prlimit(small.process.pid, resource.RLIMIT_FSIZE, before)
    ended = small.ended(job)
    assert ended["state"] == "failed" and ended["error"]["code"] == "storage"
    assert small.ended(small.submit(steps=1))["state"] == "done"


def test_a_job_that_kills_its_process_twice_fails_with_the_reason(small: Worker) -> None:
    small.wait_ready()
    job = small.submit(steps=150)
    for attempt in (1, 2):
        running(small, job, attempt)
        for pid in small.model_pids():
            os.kill(pid, signal.SIGKILL)
    ended = small.ended(job)
    assert ended["state"] == "failed" and ended["error"]["code"] == "worker_crashed" and ended["attempts"] == 2
    assert "2 times" in ended["error"]["message"]
