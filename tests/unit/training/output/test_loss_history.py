"""The running average of the loss, in the log and in checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.training.tiny import log, tiny


def test_the_average_is_of_the_last_losses_also_after_a_resume(tmp_path: Path) -> None:
    straight = tiny(tmp_path / "straight", steps=8, save_every=3, keep_last=0).train()
    records = [record for record in log(tmp_path / "straight") if "loss" in record]
    for number, record in enumerate(records, 1):
        assert record["loss_average"] == pytest.approx(sum(straight.losses[:number]) / number)
        assert record["loss"] == straight.losses[number - 1]
    source = str(tmp_path / "straight" / "t-state" / "step-000003")
    tiny(tmp_path / "again", steps=8, resume=source, log_every=4).train()
    again = {record["step"]: record["loss_average"] for record in log(tmp_path / "again") if "loss" in record}
    assert again == {step: records[step - 1]["loss_average"] for step in (4, 8)}


def test_the_average_leaves_out_what_is_not_finite_and_forgets(tmp_path: Path) -> None:
    run = tiny(tmp_path, steps=4)
    run.losses.load([7.0] * 50 + [1.0] * 99 + [float("nan")])
    assert run.losses.average == 1.0
