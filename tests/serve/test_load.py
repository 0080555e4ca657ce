"""Many clients at once: no job is lost or doubled, and every image is the one that its request gives alone."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from inweave.formats.files import open_container, write_file
from inweave.models import embedded
from tests.serve.worker import SMALL, Worker
from tests.support import figure, sized

STACKS: list[list[dict[str, Any]]] = [
    [], [{"name": "pixel", "strength": 0.8}], [{"name": "ink", "strength": 1.0}],
    [{"name": "pixel", "strength": 0.5}, {"name": "ink", "strength": -0.3}],
]  # fmt: skip


def result_of(worker: Worker, job: str) -> bytes:
    document = worker.ended(job, 600)
    assert document["state"] == "done" and document["attempts"] == 1, document
    return worker.http.get(document["result"]["images"][0]["url"]).content


def test_concurrent_submissions_with_mixed_loras(worker: Worker) -> None:
    references = [result_of(worker, worker.submit(seed=5, loras=stack, **SMALL)) for stack in STACKS]
    assert len(set(references)) == len(STACKS)
    count = sized(16, 200)
    newest = worker.http.get("/v1/jobs", params={"limit": 1}).json()["jobs"][0]["id"]
    waits: list[float] = []

    async def submit_all() -> list[str]:
        async with (
            httpx.AsyncClient(base_url=worker.url, timeout=120, limits=httpx.Limits(max_connections=count)) as client,
            httpx.AsyncClient(base_url=worker.url, timeout=120) as watcher,
        ):

            async def submit(number: int) -> str:
                body = {"prompt": "a red apple", "seed": 5, "loras": STACKS[number % len(STACKS)], **SMALL}
                answer = await client.post("/v1/jobs", json=body)
                assert answer.status_code == 202, answer.text
                return str(answer.json()["id"])

            submitted = asyncio.gather(*(submit(number) for number in range(count)))
            queued = 1
            while not submitted.done() or queued:  # from the first submission to the last result
                started = time.perf_counter()
                assert (await watcher.get("/health")).status_code == 200
                waits.append(time.perf_counter() - started)
                await asyncio.sleep(0.02)
                if submitted.done() and len(waits) % 25 == 0:
                    queued = len((await watcher.get("/v1/jobs", params={"state": "queued"})).json()["jobs"])
            return list(await submitted)

    started = time.monotonic()
    jobs = asyncio.run(submit_all())
    assert len(set(jobs)) == count
    listed = [job["id"] for job in worker.http.get("/v1/jobs", params={"limit": 200}).json()["jobs"]]
    assert set(listed[:count]) == set(jobs) and newest not in listed[:count], "a job was doubled or lost"
    for number, job in enumerate(jobs):
        assert result_of(worker, job) == references[number % len(STACKS)]
        ends = [event for event in worker.events(job) if event["type"] in ("done", "failed", "cancelled")]
        assert len(ends) == 1
    waits.sort()
    slow = waits[int(len(waits) * 0.99)]
    figure(
        f"{count} concurrent submissions, {len(STACKS)} stacks of LoRAs: all done once and bit-equal in "
        f"{time.monotonic() - started:.0f} s; "
        f"/health p50 {waits[len(waits) // 2] * 1000:.1f} ms, p99 {slow * 1000:.1f} ms, "
        f"longest {waits[-1] * 1000:.1f} ms, of {len(waits)}"
    )
    if sized(0, 1):  # only meaningful on an idle machine
        assert slow < 0.1


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


def resident_bytes(worker: Worker) -> int:
    (pid,) = worker.model_pids()
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_stays_the_same_over_many_switches(worker: Worker) -> None:
    """Switches between more files than any cache should hold; each switch changes the stack."""
    files, switches, warm = sized(3, 50), sized(9, 500), sized(4, 100)
    folder = worker.data / "loras" / "switched"
    folder.mkdir()
    container = open_container(embedded.loras()["pixel"])
    for number in range(files):
        write_file(
            folder / f"switched-{number}.safetensors", container.tensors, {**container.metadata, "n": f"{number}"}
        )
    worker.http.post("/v1/loras/refresh")
    sizes = []
    for number in range(switches):
        stack = [{"name": f"switched-{number % files}", "strength": 0.1 + number % 7 / 10}]
        job = worker.ended(worker.submit(loras=stack, **SMALL))
        assert job["state"] == "done", job["error"]
        if number + 1 >= warm:
            sizes.append(resident_bytes(worker))
    shutil.rmtree(folder)
    worker.http.post("/v1/loras/refresh")
    growth = sizes[-1] / sizes[0] - 1
    figure(
        f"{switches} switches over {files} LoRAs: {sizes[-1] / 2**20:.0f} MiB resident, "
        f"{growth:+.2%} since number {warm}"
    )
    assert growth < 0.05


#: operations that answer when their job is done
WAITING = ("/sdapi/v1/txt2img", "/sdapi/v1/img2img", "/v1/images/generations", "/v1/images/edits")


def test_the_whole_interface_without_a_server_error(worker: Worker) -> None:
    """Every operation of the OpenAPI document, with requests that schemathesis generates."""
    schema = schemathesis.openapi.from_url(f"{worker.url}/openapi.json")
    worker.http.post("/v1/queue", json={"paused": True})  # requests that happen to be valid need not run
    failures: list[str] = []
    statuses: Counter[int] = Counter()
    operations = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == "/v1/queue":
            continue
        operations += 1

        @given(case=operation.as_strategy())
        @settings(max_examples=sized(5, 50), deadline=None, database=None, suppress_health_check=list(HealthCheck))
        def run(case: Any) -> None:
            if case.operation.path in WAITING and isinstance(
                case.body, dict
            ):  # the queue is paused, so it would wait forever
                case.body |= {"model": "nosuch", "override_settings": {"sd_model_checkpoint": "nosuch"}}
            response = case.call()
            statuses[response.status_code] += 1
            case.validate_response(response, checks=(not_a_server_error,))

        try:
            run()
        except AssertionError as error:
            failures.append(f"{operation.method} {operation.path}: {error}")
    for job in worker.http.get("/v1/jobs", params={"state": "queued", "limit": 200}).json()["jobs"]:
        worker.http.delete(f"/v1/jobs/{job['id']}")
    worker.http.post("/v1/queue", json={"paused": False})
    figure(f"{operations} operations, {statuses.total()} requests: {dict(sorted(statuses.items()))}")
    assert failures == [] and max(statuses) < 500
