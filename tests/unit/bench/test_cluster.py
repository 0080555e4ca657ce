"""`inweave bench cluster`: figures of simulations, and refusals of arguments that make no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inweave.cli.app import app

TIMES = ("--run-seconds", "1,3", "--read-seconds", "0.1")


def test_a_report_has_a_row_per_number_of_runners(tmp_path: Path) -> None:
    target = tmp_path / "cluster.json"
    arguments = ["--runners", "1,6", "--jobs", "600", "--loras", "50", "--node-hours", "0.05", "--json", str(target)]
    done = CliRunner().invoke(app, ["bench", "cluster", *TIMES, *arguments])
    assert done.exit_code == 0, done.output
    document = json.loads(target.read_text())
    assert [row["name"] for row in document["rows"]] == [
        "1 runner, 50 LoRAs, 80% load, a node fails every 0.05 hours",
        "6 runners, 50 LoRAs, 80% load, a node fails every 0.05 hours",
    ]
    for row in document["rows"]:
        assert row["details"]["jobs lost"] == 0 and row["details"]["nodes lost"] > 0
        assert row["details"]["runner-seconds per lost node"] >= 30
    assert "a job 2 s, reading a LoRA 0.1 s, loading the model 10 s" in document["notes"][0]


@pytest.mark.parametrize(
    "arguments", [("--runners", "0"), ("--runners", "1.5"), ("--runners", "many"), ("--lease-seconds", "5")]
)
def test_arguments_that_make_no_sense_are_named(arguments: tuple[str, str]) -> None:
    done = CliRunner().invoke(app, ["bench", "cluster", *TIMES, "--jobs", "100", *arguments])
    assert done.exit_code == 2 and arguments[0] in done.output


@pytest.mark.full
def test_service_times_of_the_embedded_model_are_measured(tmp_path: Path) -> None:
    target = tmp_path / "cluster.json"
    done = CliRunner().invoke(app, ["bench", "cluster", "--runners", "2", "--jobs", "300", "--json", str(target)])
    assert done.exit_code == 0, done.output
    assert "measured on inweave/emoji" in json.loads(target.read_text())["notes"][0]
