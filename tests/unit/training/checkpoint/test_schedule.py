"""The checkpoints and adapters that are kept: the last ones, and milestones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from inweave.training.checkpoint.store import checkpoints
from tests.unit.training.tiny import tiny


def remaining_steps(folder: Path) -> tuple[list[int], list[int]]:
    """(steps with a checkpoint, steps with an adapter)."""
    states = sorted(int(path.name.removeprefix("step-")) for path in checkpoints(folder / "t-state"))
    return states, sorted(int(path.name.removeprefix("t-")) for path in folder.glob("t-0*"))


@pytest.mark.parametrize(
    ("settings", "states", "adapters"),
    [
        ({"keep_last": 2}, [8, 9], [8]),
        ({"keep_last": 2, "keep_every": 4}, [4, 8, 9], [4, 8]),
        ({"keep_last": 1, "keep_every": 3}, [3, 6, 9], [3, 6]),
        ({"keep_last": 0}, list(range(1, 10)), list(range(1, 9))),
        ({}, [7, 8, 9], list(range(1, 9))),
    ],
)
def test_keep_last_and_milestones(settings: Any, states: list[int], adapters: list[int], tmp_path: Path) -> None:
    (tmp_path / "t-000abc").mkdir()
    tiny(tmp_path, steps=9, save_every=1, **settings).train()
    assert (tmp_path / "t-000abc").exists()
    (tmp_path / "t-000abc").rmdir()
    assert remaining_steps(tmp_path) == (states, adapters)


def test_milestones_of_epochs_are_the_first_checkpoint_of_their_range(tmp_path: Path) -> None:
    tiny(tmp_path, steps=24, save_every_epochs=1, examples=6, keep_last=1, keep_every=10).train()  # 3 steps per epoch
    assert remaining_steps(tmp_path) == ([12, 21, 24], [12, 21])


def test_adapters_of_another_run_stay(tmp_path: Path) -> None:
    other = tmp_path / "t-000001.safetensors"
    other.write_bytes(b"")
    os.utime(other, (1e9, 1e9))
    newer = tmp_path / "tt-000001.safetensors"
    newer.write_bytes(b"")
    tiny(tmp_path, steps=4, save_every=1, keep_last=1).train()
    assert other.exists() and newer.exists()
    assert sorted(path.name for path in tmp_path.glob("t-00000?")) == []
