"""Two web processes on one queue in PostgreSQL and one Ray cluster: any process is killed, at any moment, 60 times.

Each kill is one of

    runner           the actor of a runner, with its model process
    model            a model process
    node             every process of a node; another one joins
    stopped node     a node that stops for longer than its lease, and comes back
    bridge           the connection of a web process to Ray
    web              a web process; it starts again on its data
    head             the head of the cluster; it starts again with its state on disk
    database         PostgreSQL restarts, or is killed
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from inweave.serve.engine.contract import LEASE
from tests.serve.cluster.nodes import Nodes, descendants, model_pids
from tests.serve.postgres import Postgres
from tests.serve.test_crashes import start_training, two_images
from tests.serve.test_several_workers import accepted, ends_once, result_bits
from tests.serve.worker import SMALL, Worker
from tests.support import figure

pytestmark = pytest.mark.full  # test_cluster.py and test_several_workers.py are the samples
KILLS = int(os.environ.get("INWEAVE_SOAK_KILLS", "60"))
QUEUED, RUNS = 20, 2
KINDS = ("runner", "web", "node", "database", "bridge", "model", "head", "stopped node")
#: reasons of a job that failed because its process was killed during both of its attempts
CRASHES = {"worker_crashed", "worker_restarted", "worker_lost"}


class Site(NamedTuple):
    nodes: Nodes
    workers: tuple[Worker, Worker]
    postgres: Postgres

    def strike(self, kind: str, chance: random.Random) -> None:
        """Kill one process, or those of one node."""
        worker, node = chance.choice(self.workers), chance.choice(self.nodes.nodes)
        if kind == "web":
            worker.kill()
            worker.start(wait=False)
        elif kind == "database":
            self.postgres.restart(chance.choice(["fast", "immediate"]))
        elif kind == "head":
            self.nodes.restart_head()
        elif kind == "bridge":
            kill(worker.child_pids("inweave.serve.cluster.bridge"))
        elif kind == "stopped node":
            self.nodes.signal(node, signal.SIGSTOP)
            time.sleep(LEASE + chance.uniform(1.0, 4.0))
            self.nodes.signal(node, signal.SIGCONT)
        elif kind == "node":
            self.nodes.kill(node)
            self.nodes.add()
        else:
            processes = self.nodes.pids(node)
            models = model_pids(processes)
            actors = [next(each for each in processes if pid in descendants(each)) for pid in models]
            kill(models if kind == "model" else actors)

    def until_answers(self) -> None:
        """Wait until both workers read the queue."""
        for each in self.workers:
            each.until(lambda each=each: answers(each))  # type: ignore[misc]


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def answers(worker: Worker) -> bool:
    return worker.http.get("/v1/queue").status_code == 200


@pytest.fixture
def site(tmp_path: Path, postgres: Postgres) -> Iterator[Site]:
    state = tmp_path / "head"
    state.mkdir()
    nodes = Nodes(3, state)
    options = (
        "--store", postgres.database("site"), "--blobs", str(tmp_path / "shared"), "--lease-seconds", "4",
        "--cluster", nodes.address, "--node-cache", str(tmp_path / "cache"), "--max-runners", "2",
        "--min-runners", "1", "--drain-seconds", "2", "--log-level", "info",
    )  # fmt: skip
    one, two = (Worker(tmp_path / name, *options).start(wait=False) for name in ("one", "two"))
    site = Site(nodes, (one, two), postgres)
    try:
        for each in site.workers:
            each.wait_ready()
        yield site
    finally:
        for each in site.workers:
            each.stop()
        nodes.stop()


def test_sixty_kills_of_any_process_lose_nothing(site: Site) -> None:
    pair, chance, kinds = site.workers, random.Random(30), Counter[str]()
    small: dict[str, Any] = {"prompt": "a red apple", "seed": 11, **SMALL}
    first = pair[0].ended(accepted(pair, "/v1/jobs", small))
    reference = pair[0].http.get(first["result"]["images"][0]["url"]).content
    dataset = two_images(pair[0])
    straight = start_training(pair[0], dataset, "straight", steps=12)
    expected = result_bits(pair[0], straight)
    assert any(any(bits) for bits in expected.values())
    runs = [start_training(pair[0], dataset, f"run{number}", steps=12, save_every=2) for number in range(RUNS)]
    begun, jobs = time.monotonic(), list[str]()
    for number in range(KILLS):
        jobs += [accepted(pair, "/v1/jobs", small) for _ in range(QUEUED - pair[0].queued())]
        kind = KINDS[number % len(KINDS)]
        site.strike(kind, chance)
        kinds[kind] += 1
        print(f"{time.monotonic() - begun:.0f} s: {number + 1} {kind}", flush=True)
        site.until_answers()
        time.sleep(chance.uniform(0.0, 4.0))
    states = Counter[str]()
    for job in jobs:
        ended = pair[0].ended(job, 600)
        states[ended["state"]] += 1
        ends_once(pair[1], job)
        if ended["state"] == "done":
            assert pair[1].http.get(ended["result"]["images"][0]["url"]).content == reference
        else:
            assert ended["error"]["code"] in CRASHES and ended["attempts"] == 2, ended
    resumed = 0
    for job in runs:
        while (ended := pair[0].ended(job, 600))["state"] == "failed":
            assert ended["error"]["code"] in CRASHES and ended["attempts"] == 2, ended
            ends_once(pair[0], job)
            job, resumed = pair[0].http.post(f"/v1/jobs/{job}/retry").json()["id"], resumed + 1
        ends_once(pair[1], job)
        assert result_bits(pair[0], job) == expected
    figure(
        f"{sum(kinds.values())} kills ({dict(kinds)}) with {QUEUED} image jobs and {RUNS} training runs queued, two "
        f"web processes: {len(jobs)} image jobs, {dict(states)}, none lost, none ended twice; {RUNS} training runs "
        f"with the bits of an undisturbed one ({resumed} resumed by hand), {time.monotonic() - begun:.0f} s"
    )
