"""`graph` and `compile`: the impossible is refused before weights are read, and the log has the choice and its cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from inweave.training.config.schema import TrainConfig
from inweave.training.execution.capture import capture_problems
from inweave.training.execution.modes import describe_modes, mode_problems
from tests.unit.training.tiny import tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config(**settings: object) -> TrainConfig:
    return TrainConfig.of(dataset="-", **settings)


def test_only_what_is_on_is_refused() -> None:
    network = {"unet": nn.Linear(2, 2)}
    assert mode_problems(network, config(), CPU) == []
    problems = mode_problems(network, config(graph="on", compile="on", optimizer="adafactor"), CPU)
    reason = "device cpu: only NVIDIA GPUs have CUDA graphs"
    assert problems[0] == f'graph = "on": {reason}; leave it out, and steps run eagerly'
    assert any(problem.startswith('compile = "on": device cpu') for problem in problems[1:])
    assert capture_problems(config(), CUDA) == [] and len(capture_problems(config(shard=True), CUDA)) == 1


def test_the_log_says_what_was_chosen_and_why() -> None:
    nothing: tuple[list[str], list[str]] = ([], [])
    assert describe_modes(config(), 500, sizes=3, recorded=True, compiled=57, against=nothing) == (
        "steps are recorded as CUDA graphs; 57 blocks are compiled"
    )
    assert describe_modes(config(), 9, sizes=1, recorded=False, compiled=0, against=nothing) == (
        "steps run eagerly (9 steps are too few to make up for recording them); "
        "no blocks are compiled (compiling would take longer than it saves in 9 steps)"
    )
    text = describe_modes(config(), 90, sizes=30, recorded=False, compiled=0, against=nothing)
    assert text.startswith(
        "steps run eagerly (90 steps with 30 batch sizes are too few to make up for recording them);"
    )
    text = describe_modes(config(optimizer="prodigy"), 500, sizes=1, recorded=True, compiled=57, against=nothing)
    assert text == (
        "forward and backward passes are recorded as CUDA graphs, and the optimizer runs eagerly (prodigy: its step "
        "reads the learning rate and the finite check on the host); 57 blocks are compiled"
    )
    off, against = config(graph="off"), (["why"], ["no compiler", "no Triton"])
    assert describe_modes(off, 9, sizes=1, recorded=False, compiled=0, against=against) == (
        'steps run eagerly (graph = "off"); no blocks are compiled (no compiler; no Triton)'
    )


@pytest.mark.parametrize(("optimizer", "recorded"), [("adamw", True), ("adamw8bit", True), ("adafactor", False)])
def test_which_parts_of_an_update_are_recorded(
    optimizer: str, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny(tmp_path, optimizer=optimizer)
    keys: list[object] = []

    def record(key: object, work: Callable[[], None], *, can_split: bool = False) -> None:
        keys.append(key)
        work()

    monkeypatch.setattr(run.step.graphs, "run", record)
    before = run.step.flat.values.clone()
    run.train()
    assert not torch.equal(before, run.step.flat.values)
    assert ("update" in keys) is recorded and len(set(keys) - {"update"}) >= 1


def test_the_time_of_recording_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = tiny(tmp_path).step
    assert list(step.new_events(1)) == []
    monkeypatch.setattr(type(step.graphs), "__len__", lambda self: 2)
    step.graphs.seconds = 1.25
    (event,) = step.new_events(1)
    assert event["event"] == "graph" and event["text"].endswith("recorded as CUDA graphs, which took 1.2 s")
    assert list(step.new_events(1)) == []


def test_why_steps_are_not_recorded_is_logged_once(tmp_path: Path) -> None:
    step = tiny(tmp_path).step
    step.graphs.problem = "operation not permitted when stream is capturing"
    (event,) = step.new_events(1)
    assert event["event"] == "graph failed" and event["text"] == (
        "steps cannot be recorded as CUDA graphs and run eagerly: operation not permitted when stream is capturing"
    )
    assert list(step.new_events(1)) == []
