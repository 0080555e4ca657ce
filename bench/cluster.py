"""What a Ray cluster of one runner costs, compared with a plain worker on the same machine.

    .venv/bin/python bench/cluster.py [--calls 500] [--jobs 40]

dispatch    from a command of the dispatcher to the report of the runner, for a command without work: what a job waits
            longer in a cluster before its runner starts
jobs        from submission to end of the same small job on both workers, by turns, one at a time
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = "inweave/emoji"


async def round_trips(endpoint: Any, calls: int) -> list[float]:
    """Return the seconds from `Load` of a model that is loaded to `Loaded`, many times."""
    from inweave.serve.engine.contract import Load, RunnerSettings

    await endpoint.start(RunnerSettings("cpu"))
    await endpoint.receive()
    seconds = []
    for number in range(calls + 20):
        begun = time.perf_counter()
        await endpoint.send(Load(MODEL))
        await endpoint.receive()
        if number >= 20:  # the first ones load the model and warm up connections
            seconds.append(time.perf_counter() - begun)
        await asyncio.sleep(0.01)
    await endpoint.stop()
    return seconds


async def dispatch(calls: int) -> tuple[list[float], list[float]]:
    """Return the times of round trips to a child process and to an actor."""
    from inweave.serve.cluster.client import ClusterClient
    from inweave.serve.cluster.endpoint import Placement, RayEndpoint
    from inweave.serve.engine.child_process import ProcessEndpoint

    plain = await round_trips(ProcessEndpoint(), calls)
    client = ClusterClient("local")
    running = asyncio.create_task(client.run())
    with tempfile.TemporaryDirectory() as cache:
        ray = await round_trips(RayEndpoint(client, Placement(1.0, 0.0, cache, 10**9, cache)), calls)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await client.close()
    return plain, ray


def jobs(count: int) -> tuple[list[float], list[float]]:
    """Return the times of the same job on a plain worker and on a cluster of one."""
    from tests.serve.worker import Worker

    with tempfile.TemporaryDirectory() as folder:
        plain = Worker(Path(folder) / "plain").start()
        ray = Worker(Path(folder) / "ray", "--cluster", "local", "--node-cache", f"{folder}/cache").start()
        times: dict[str, list[float]] = {plain.url: [], ray.url: []}
        for number in range(count + 3):
            for worker in (plain, ray) if number % 2 else (ray, plain):
                begun = time.perf_counter()
                job = worker.submit(steps=20, width=128, height=128, seed=number)
                while [*worker.events(job)][-1]["type"] != "done":
                    pass
                if number >= 3:
                    times[worker.url].append(time.perf_counter() - begun)
        answer = times[plain.url], times[ray.url]
        plain.stop()
        ray.stop()
    return answer


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=40)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    plain, ray = asyncio.run(dispatch(options.calls))
    for name, values in (("plain", plain), ("cluster", ray)):
        half, most = (1e3 * percentile(values, share) for share in (0.5, 0.99))
        print(f"dispatch, {name}: p50 {half:.2f} ms, p99 {most:.2f} ms")
    if not options.jobs:
        return
    plain, ray = jobs(options.jobs)
    pairs = [there / here - 1 for here, there in zip(plain, ray, strict=True)]
    print(f"jobs: plain {statistics.median(plain):.3f} s, cluster {statistics.median(ray):.3f} s; {len(plain)} of each")
    print(f"jobs: the cluster takes {100 * statistics.median(pairs):+.1f} % (median of pairs)")
    print(f"jobs: fastest {min(plain):.3f} s and {min(ray):.3f} s, {100 * (min(ray) / min(plain) - 1):+.1f} %")


if __name__ == "__main__":
    main()
