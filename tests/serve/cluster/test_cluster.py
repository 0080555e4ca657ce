"""A worker whose runners are Ray actors on several nodes of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from inweave.cli.app import app
from tests.serve.cluster.setup import LONG, Setup, cluster
from tests.serve.worker import SMALL


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with cluster(tmp_path_factory.mktemp("pair"), 2, "--min-runners", "2") as setup:
        setup.until_ready(2)
        yield setup


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
    pair.nodes.kill(pair.nodes.node(pair.node_of(job)))
    ended = pair.worker.ended(job)
    assert (ended["state"], ended["attempts"]) == ("done", 1), "the loss of a node is not an attempt of the job"
    assert pair.losses(job) == ["runner_lost"]
