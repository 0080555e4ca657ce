"""Saving, sampling and validating every k steps or epochs."""

from __future__ import annotations

from pathlib import Path

import pytest

from inweave.training.checkpoint.store import checkpoints
from inweave.training.data.batches import epoch_length, total_steps
from inweave.training.data.intervals import Interval
from inweave.training.output.samples import SampleImage
from tests.unit.training.tiny import tiny


@pytest.mark.parametrize(
    ("steps", "epochs", "per_step", "per_epoch", "expected"),
    [
        (0, 1, 1, 5, [5, 10, 15, 20]),
        (0, 2, 1, 5, [10, 20]),
        (0, 1, 2, 5, [3, 5, 8, 10, 13, 15, 18, 20]),  # the step that completes the epoch, whatever else it holds
        (0, 1, 7, 3, list(range(1, 21))),  # every step completes two or three
        (0, 3, 7, 3, [2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 18, 20]),
        (4, 0, 1, 5, [4, 8, 12, 16, 20]),
        (4, 1, 1, 5, [4, 5, 8, 10, 12, 15, 16, 20]),
        (0, 0, 1, 5, []),
    ],
)
def test_intervals(steps: int, epochs: int, per_step: int, per_epoch: int, expected: list[int]) -> None:
    interval = Interval(steps, epochs, per_step, per_epoch)
    assert [step for step in range(1, 21) if interval.due(step)] == expected
    assert bool(interval) == bool(steps or epochs)
    ends = [-(-e * per_epoch // per_step) for e in range(epochs, 999, epochs)] if epochs and not steps else None
    assert ends is None or expected == sorted({end for end in ends if end <= 20})


def test_saving_sampling_and_validating_by_epochs(tmp_path: Path) -> None:
    run = tiny(
        tmp_path, steps=12, save_every_epochs=1, keep_last=0, sample_every_epochs=2, validate_every_epochs=2,
        validation_split=0.2, log_every=100,
    )  # fmt: skip
    assert len(run.task.order) == 5
    sampled: list[int] = []

    def sample(step: int) -> list[SampleImage]:
        sampled.append(step)
        return []

    done = run.train(sample=sample)
    assert sampled == [10] and [step for step, _ in done.validation] == [10, 12]
    assert sorted(path.name for path in checkpoints(tmp_path / "t-state")) == [
        "step-000005",
        "step-000010",
        "step-000012",
    ]
    assert sorted(path.name for path in tmp_path.glob("t-0*")) == ["t-000005", "t-000010"]


def test_validation_by_steps_beside_checkpoints(tmp_path: Path) -> None:
    run = tiny(tmp_path, steps=7, save_every=2, validate_every=3, validation_split=0.2)
    assert [step for step, _ in run.train().validation] == [3, 6, 7]


@pytest.mark.parametrize(
    ("batches", "micro", "epochs", "steps"), [(10, 4, 3, 9), (8, 4, 3, 6), (1, 4, 5, 5), (7, 1, 2, 14)]
)
def test_epochs_of_whole_steps_are_those_of_kohya(batches: int, micro: int, epochs: int, steps: int) -> None:
    """epochs * ceil(n / accumulation) steps, and every epoch ends with a step of its own."""
    epoch = epoch_length(batches, micro, "whole")
    assert total_steps(epoch, micro, steps=None, epochs=epochs) == steps == epochs * -(-batches // micro)
    interval = Interval(0, 1, micro, epoch)
    assert [step for step in range(1, steps + 1) if interval.due(step)] == [
        n * steps // epochs for n in range(1, epochs + 1)
    ]
    assert epoch_length(batches, micro, "exact") == batches
