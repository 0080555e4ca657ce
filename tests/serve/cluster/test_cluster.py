"""A worker whose runners are Ray actors on several nodes of this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from inweave.cli.app import app
from tests.serve.cluster.nodes import Nodes
from tests.serve.worker import SMALL, Worker

LONG: dict[str, Any] = {"steps": 60, "width": 128, "height": 128}


class Setup(NamedTuple):
    nodes: Nodes
    worker: Worker

    @property
    def devices(self) -> list[dict[str, Any]]:
        devices: list[dict[str, Any]] = self.worker.http.get("/v1/queue").json()["devices"]
        return devices

    def node_of(self, job: str) -> str:
        """Return the node that runs a job."""
        self.worker.until(lambda: job in [each["job"] for each in self.devices])
        return next(each["node"] for each in self.devices if each["job"] == job)

    def ray_node(self, name: str) -> Any:
        """Return a node by its name for people."""
        return next(each for each in self.nodes.nodes if each.node_id[:6] == name.rpartition("-")[2])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("cluster")
    nodes = Nodes(2)
    worker = Worker(
        folder / "data", "--cluster", nodes.address, "--node-cache", str(folder / "cache"), "--min-runners", "2",
        "--log-level", "info",
    )  # fmt: skip
    try:
        setup = Setup(nodes, worker.start())
        worker.until(lambda: [each["status"] for each in setup.devices] == ["ready"] * 2)
        yield setup
        worker.stop()
    finally:
        nodes.stop()


def test_jobs_run_on_nodes_and_meet_the_one_that_holds_their_lora(pair: Setup) -> None:
    for _ in range(4):
        assert pair.worker.ended(pair.worker.submit(**SMALL, loras=[{"name": "pixel"}]))["state"] == "done"
    assert sorted(each["adapters"] for each in pair.devices) == [0, 1], "one device holds it and ran all of them"
    assert len({each["node"] for each in pair.devices}) == 2
    answer = CliRunner().invoke(app, ["cluster", "status", "--url", pair.worker.url])
    assert answer.exit_code == 0, answer.output
    assert all(each["node"] in answer.output and each["name"] in answer.output for each in pair.devices)
    assert "inweave/emoji" in answer.output and "waiting: 0: none" in answer.output


def test_a_job_of_a_node_that_is_killed_runs_elsewhere(pair: Setup) -> None:
    job = pair.worker.submit(**LONG)
    node = pair.node_of(job)
    pair.nodes.signal(pair.ray_node(node), signal.SIGKILL)
    ended = pair.worker.ended(job)
    assert (ended["state"], ended["attempts"]) == ("done", 1), "the loss of a node is not an attempt of the job"
    retried = [each for each in pair.worker.events(job) if each["type"] == "retried"]
    assert [each["code"] for each in retried] == ["runner_lost"]
