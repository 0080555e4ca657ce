"""What a Ray cluster of one runner costs, compared with a plain worker on the same machine.

    .venv/bin/python bench/cluster.py [--calls 500] [--rounds 8] [--jobs 10]

dispatch    from a command of the dispatcher to the report of the runner, for a command without work: what a job waits
            longer in a cluster before its runner starts
jobs        time per job of a queue that is never empty, on both workers by turns, and the processor time of all their
            processes
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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


def jobs(rounds: int, size: int) -> dict[str, list[tuple[float, float]]]:
    """Return (seconds, processor seconds) per job of rounds of ``size`` waiting jobs, on either worker by turns."""
    from tests.serve.worker import Worker

    with tempfile.TemporaryDirectory() as folder:
        plain = Worker(Path(folder) / "plain").start()
        ray = Worker(Path(folder) / "ray", "--cluster", "local", "--node-cache", f"{folder}/cache").start()
        figures: dict[str, list[tuple[float, float]]] = {"plain": [], "cluster": []}
        for number in range(rounds + 1):
            for name, worker in (("plain", plain), ("cluster", ray))[:: 1 if number % 2 else -1]:
                processor = processor_seconds(worker)
                made = [worker.submit(steps=20, width=128, height=128, seed=seed) for seed in range(size + 1)]
                ended = [worker.ended(job) for job in made]
                assert {each["state"] for each in ended} == {"done"}
                seconds = ended[-1]["finished"] - ended[0]["finished"]  # without the first one's wait for the others
                if number > 0:
                    spent = processor_seconds(worker) - processor
                    figures[name].append((seconds / size, spent / (size + 1)))
        plain.stop()
        ray.stop()
    return figures


def processor_seconds(worker: Any) -> float:
    """Return the processor time of a worker and of every process below it, so far."""
    from tests.serve.cluster.nodes import descendants

    total = 0
    for pid in (worker.process.pid, *descendants(worker.process.pid)):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=10, help="of a round")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.calls:
        plain, ray = asyncio.run(dispatch(options.calls))
        for name, values in (("plain", plain), ("cluster", ray)):
            half, most = (1e3 * percentile(values, share) for share in (0.5, 0.99))
            print(f"dispatch, {name}: p50 {half:.2f} ms, p99 {most:.2f} ms")
    if options.rounds:
        figures = jobs(options.rounds, options.jobs)
        for place, what in enumerate(("seconds", "processor seconds")):
            plain, ray = ([each[place] for each in figures[name]] for name in ("plain", "cluster"))
            pairs = [there / here - 1 for here, there in zip(plain, ray, strict=True)]
            least = f"{min(plain):.4f} and {min(ray):.4f}, {100 * (min(ray) / min(plain) - 1):+.1f} %"
            print(f"{what} per job: {statistics.median(plain):.4f} plain, {statistics.median(ray):.4f} in a cluster")
            print(f"    median of pairs: {100 * statistics.median(pairs):+.1f} %; least: {least}; {len(plain)} rounds")


if __name__ == "__main__":
    main()
