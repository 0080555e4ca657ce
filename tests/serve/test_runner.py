"""The runner without queues and processes: models within a budget, events without paths of the machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inweave.errors import MemoryBudgetError
from inweave.models import embedded
from inweave.serve.engine.contract import RunnerSettings, RunRequest
from inweave.serve.engine.runner import Runner, model_bytes
from inweave.serve.jobs.job import Event


@pytest.fixture
def other(tmp_path: Path) -> str:
    """Return a copy of the embedded model under another name."""
    return str(shutil.copytree(embedded.folder(), tmp_path / "other", ignore=shutil.ignore_patterns("loras")))


def test_models_stay_loaded_within_the_budget(other: str) -> None:
    size = model_bytes(Runner(RunnerSettings()).load(embedded.NAME))
    for budget, names in (
        (None, [other]),
        (size, [other]),
        (2 * size - 1, [other]),
        (2 * size, [embedded.NAME, other]),
    ):
        runner = Runner(RunnerSettings(memory_bytes=budget))
        first = runner.load(embedded.NAME)
        assert runner.load(embedded.NAME) is first
        runner.load(other)
        assert list(runner._models) == names, budget
    runner.load(embedded.NAME)
    assert list(runner._models) == [other, embedded.NAME], "the one that was idle longest goes first"


def test_a_model_that_is_larger_than_the_budget_is_refused() -> None:
    runner = Runner(RunnerSettings(memory_bytes=1000))
    with pytest.raises(MemoryBudgetError, match="of weights"):
        runner.load(embedded.NAME)
    assert not runner._models


def test_events_and_results_name_no_path(other: str, tmp_path: Path) -> None:
    events: list[Event] = []
    request = RunRequest(
        "job-1", "image_generation", other, {"prompt": "x", "steps": 1, "width": 64, "height": 64}, name="mine"
    )
    result = Runner(RunnerSettings()).run(request, events.append, lambda: False)
    assert events[0] == Event("loading", {"model": "mine"})
    assert str(tmp_path) not in str(result)
    assert not any(str(tmp_path).encode() in event.image for event in events if event.image is not None)
