"""Nodes, runners, web processes and heads that are killed, stopped or cut off: no job is lost or finished twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inweave.serve.engine.contract import LEASE
from tests.serve.cluster.nodes import descendants, model_pids
from tests.serve.cluster.setup import LONG, Setup, cluster
from tests.serve.test_crashes import ENDS, resumed_from, start_training, trained_bits, two_images, until_step
from tests.serve.worker import SMALL
from tests.support import figure

pytestmark = pytest.mark.full  # test_cluster.py is the sample


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("trio")
    with cluster(folder, 3, "--min-runners", "2", "--max-runners", "3", keep_state=True) as setup:
        setup.until_ready(2)
        yield setup


def ends_once(setup: Setup, job: str) -> str:
    """Check that a job has ended once, and that its events are complete; return its state."""
    document = setup.worker.ended(job, 600)
    events = [*setup.worker.events(job)]
    assert [each["event"] for each in events] == [*range(1, len(events) + 1)]
    assert [each["type"] for each in events if each["type"] in ENDS] == [document["state"]]
    return str(document["state"])


def test_a_node_that_stops_and_comes_back_finishes_nothing_twice(trio: Setup) -> None:
    trio.until_ready(2)
    job = trio.worker.submit(**LONG)
    node = trio.nodes.node(trio.node_of(job))
    begun = time.monotonic()
    trio.nodes.signal(node, signal.SIGSTOP)
    models = model_pids(trio.nodes.pids(node))
    assert len(models) == 1
    trio.worker.until(
        lambda: any(each["job"] == job and each["node"] not in ("", node_name(node)) for each in trio.devices)
    )
    seconds = time.monotonic() - begun
    assert seconds < LEASE + 10
    figure(f"a job of a stopped node runs elsewhere after {seconds:.1f} s")
    assert ends_once(trio, job) == "done"
    assert trio.losses(job) == ["runner_lost"] and trio.worker.job(job)["attempts"] == 1
    trio.nodes.signal(node, signal.SIGCONT)
    trio.worker.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in models), 10)
    assert ends_once(trio, job) == "done"
    trio.nodes.kill(node)
    trio.nodes.add()


def node_name(node: Any) -> str:
    return f"127.0.0.1-{node.node_id[:6]}"


def test_a_job_runs_on_while_the_head_restarts(trio: Setup) -> None:
    trio.until_ready(2)
    job = trio.worker.submit(**LONG | {"count": 4})
    trio.node_of(job)
    trio.nodes.restart_head()
    assert ends_once(trio, job) == "done"
    assert trio.losses(job) == [] and trio.worker.job(job)["attempts"] == 1
    assert ends_once(trio, trio.worker.submit(**SMALL)) == "done"


def test_training_whose_node_is_lost_continues_on_another_with_the_same_bits(trio: Setup) -> None:
    """The second node is stopped, and comes back while the run goes on elsewhere in the same folder."""
    dataset = two_images(trio.worker)
    expected = trained_bits(trio.worker, start_training(trio.worker, dataset, "straight", steps=10))
    assert len(expected) > 10 and any(any(bits) for bits in expected.values())
    for loss in ("killed", "stopped"):
        job = start_training(trio.worker, dataset, loss, save_every=2, steps=10)
        until_step(trio.worker, job, 3)
        node = trio.nodes.node(trio.node_of(job))
        if loss == "stopped":
            trio.nodes.signal(node, signal.SIGSTOP)
            until_step(trio.worker, job, 9)
            trio.nodes.signal(node, signal.SIGCONT)
        trio.nodes.kill(node)
        trio.nodes.add()
        assert trained_bits(trio.worker, job) == expected
        assert trio.losses(job) == ["runner_lost"] and trio.worker.job(job)["attempts"] == 1
        (step,) = resumed_from(trio.worker, job)
        assert step >= 2
        figure(f"training on a node that was {loss}: it resumed from step {step} of 10 and has the same bits")


def test_kills_at_any_moment_lose_nothing(trio: Setup) -> None:
    chance, jobs, kinds = random.Random(7), list[str](), Counter[str]()
    worker = trio.worker
    first = worker.ended(worker.submit(seed=11, **SMALL))
    reference = worker.http.get(first["result"]["images"][0]["url"]).content
    begun = time.monotonic()
    for number in range(12):
        while worker.queued() < 20:
            jobs.append(worker.submit(seed=11, **SMALL))
        time.sleep(chance.uniform(0.0, 6.0))
        kind = ("node", "bridge", "actor", "web", "stopped node", "model")[number % 6]
        kinds[kind] += 1
        node = chance.choice(trio.nodes.nodes)
        if kind == "web":
            worker.kill()
            worker.start(wait=False)
        elif kind == "bridge":
            for pid in worker.child_pids("inweave.serve.cluster.bridge"):
                os.kill(pid, signal.SIGKILL)
        elif kind == "stopped node":
            trio.nodes.signal(node, signal.SIGSTOP)
            time.sleep(LEASE + 4)
            trio.nodes.signal(node, signal.SIGCONT)
        elif kind == "node":
            trio.nodes.kill(node)
            trio.nodes.add()
        else:
            models = model_pids(trio.nodes.pids(node))
            for pid in models:
                parents = [each for each in trio.nodes.pids(node) if pid in descendants(each)]
                os.kill(pid if kind == "model" else parents[0], signal.SIGKILL)
    states = Counter(ends_once(trio, job) for job in jobs)
    for job in jobs:
        document = worker.job(job)
        if document["state"] == "done":
            assert worker.http.get(document["result"]["images"][0]["url"]).content == reference
        else:
            assert document["error"]["code"] in ("worker_crashed", "worker_restarted") and document["attempts"] == 2
    figure(
        f"{sum(kinds.values())} kills ({dict(kinds)}) with 20 jobs queued: {len(jobs)} jobs, {dict(states)}, none "
        f"lost, none ended twice, {time.monotonic() - begun:.0f} s"
    )


def test_a_cluster_that_is_gone_is_found_again(trio: Setup) -> None:
    job = trio.worker.submit(**LONG)
    trio.node_of(job)
    trio.nodes.stop()
    trio.worker.until(lambda: trio.worker.http.get("/ready").status_code == 503, 120)
    assert trio.worker.http.get("/health").status_code == 200
    trio.nodes.start(2)
    assert ends_once(trio, job) == "done"
