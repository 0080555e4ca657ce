"""Many clients at once: nothing lost, nothing doubled, every image the one that its request gives alone."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from tests.serve.worker import Worker
from tests.support import sized

STACKS: list[list[dict[str, Any]]] = [
    [], [{"name": "pixel", "strength": 0.8}], [{"name": "ink", "strength": 1.0}],
    [{"name": "pixel", "strength": 0.5}, {"name": "ink", "strength": -0.3}],
]  # fmt: skip


def result_of(worker: Worker, job: str) -> bytes:
    document = worker.ended(job, 600)
    assert document["state"] == "done", document["error"]
    return worker.http.get(document["result"]["images"][0]["url"]).content


def test_concurrent_submissions_with_mixed_loras(worker: Worker) -> None:
    references = [result_of(worker, worker.submit(seed=5, loras=stack, steps=1)) for stack in STACKS]
    assert len(set(references)) == len(STACKS)
    count = sized(24, 200)
    waits: list[float] = []

    async def submit_all() -> list[str]:
        async with httpx.AsyncClient(
            base_url=worker.url, timeout=120, limits=httpx.Limits(max_connections=50)
        ) as client:
            done = asyncio.Event()

            async def watch() -> None:
                while not done.is_set():
                    started = time.perf_counter()
                    assert (await client.get("/health")).status_code == 200
                    waits.append(time.perf_counter() - started)
                    await asyncio.sleep(0.01)

            async def submit(number: int) -> str:
                body = {"prompt": "a red apple", "steps": 1, "seed": 5, "loras": STACKS[number % len(STACKS)]}
                answer = await client.post("/v1/jobs", json=body)
                assert answer.status_code == 202, answer.text
                return str(answer.json()["id"])

            watcher = asyncio.create_task(watch())
            jobs = await asyncio.gather(*(submit(number) for number in range(count)))
            done.set()
            await watcher
            return list(jobs)

    jobs = asyncio.run(submit_all())
    assert len(set(jobs)) == count
    for number, job in enumerate(jobs):
        assert result_of(worker, job) == references[number % len(STACKS)]
        ends = [event for event in worker.events(job) if event["type"] in ("done", "failed", "cancelled")]
        assert len(ends) == 1
    waits.sort()
    if os.environ.get("INWEAVE_FULL_TESTS"):  # a figure of an idle machine
        assert waits[int(len(waits) * 0.99)] < 0.1


def test_many_readers_see_the_same_events(worker: Worker) -> None:
    job = worker.submit(steps=4)

    async def read_all() -> list[list[str]]:
        async def read() -> list[str]:
            async with (
                httpx.AsyncClient(base_url=worker.url, timeout=120) as client,
                client.stream("GET", f"/v1/jobs/{job}/events") as stream,
            ):
                return [line async for line in stream.aiter_lines() if line.startswith(("id", "event", "data"))]

        return await asyncio.gather(*(read() for _ in range(5)))

    streams = asyncio.run(read_all())
    assert streams[0] and all(stream == streams[0] for stream in streams)


@pytest.mark.full
def test_memory_stays_the_same_over_many_switches(tmp_path: Path) -> None:
    own = Worker(tmp_path / "data").start()
    try:
        sizes = []
        for number in range(500):
            own.ended(own.submit(steps=1, loras=STACKS[number % len(STACKS)]))
            if number in (100, 499):
                (pid,) = own.model_pids()
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                sizes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        assert sizes[1] < 1.05 * sizes[0]
    finally:
        own.stop()


def test_the_whole_interface_without_a_server_error(worker: Worker) -> None:
    """Every operation of the OpenAPI document, with what schemathesis makes up for it."""
    schema = schemathesis.openapi.from_url(f"{worker.url}/openapi.json")
    worker.http.post("/v1/queue", json={"paused": True})  # what is accepted by chance need not run
    failures: list[str] = []
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == "/v1/queue":
            continue

        @given(case=operation.as_strategy())
        @settings(max_examples=sized(5, 50), deadline=None, database=None, suppress_health_check=list(HealthCheck))
        def run(case: Any) -> None:
            response = case.call()
            case.validate_response(response, checks=(not_a_server_error,))

        try:
            run()
        except AssertionError as error:
            failures.append(f"{operation.method} {operation.path}: {error}")
    for job in worker.http.get("/v1/jobs", params={"state": "queued", "limit": 200}).json()["jobs"]:
        worker.http.delete(f"/v1/jobs/{job['id']}")
    worker.http.post("/v1/queue", json={"paused": False})
    assert failures == []
