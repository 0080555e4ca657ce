"""A resumed run may get longer or shorter, and settings without effect may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.checkpoint.resume import ensure_resumable
from inweave.training.checkpoint.store import checkpoints, load_state
from inweave.training.optim.schedules import learning_rate
from tests.unit.training.tiny import EVERYTHING, file_bits, log, state_bits, tiny


def resumed_notes(folder: Path) -> list[str]:
    return [record["text"] for record in log(folder) if record.get("event") == "resumed"]


def test_a_finished_run_with_a_schedule_that_ends_is_extended(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**EVERYTHING, "lr_scheduler": "cosine", "warmup": 0.25}
    short = tiny(tmp_path / "a", steps=4, **settings).train()
    shorter_bits = file_bits(short.path)
    longer = tiny(tmp_path / "a", steps=8, resume="auto", save_every=1, keep_last=0, **settings)
    done = longer.train()
    assert done.step == 8 and len(done.losses) == 4
    assert file_bits(tmp_path / "a" / "t-000004") == shorter_bits, "the shorter run's adapter is not lost"
    rates = [record["lr"] for record in log(tmp_path / "a") if "lr" in record]
    curve = {total: [0.05 * learning_rate(step, total, "cosine", 0.25) for step in range(total)] for total in (4, 8)}
    assert rates == pytest.approx([*curve[4], *curve[8][4:]])
    notes = resumed_notes(tmp_path / "a")
    assert notes[1] == "the run is extended from 4 to 8 steps"
    assert 'lr_scheduler = "cosine", warmup = 0.25 depends on the number of steps' in notes[2]
    assert f"goes from {curve[4][3]:.3g} to {curve[8][4]:.3g}" in notes[2]
    for step in (5, 7):  # and it resumes as any other
        source = str(tmp_path / "a" / "t-state" / f"step-{step:06d}")
        again = tiny(tmp_path / f"from-{step}", steps=8, resume=source, **settings)
        assert file_bits(again.train().path) == file_bits(done.path) and state_bits(again) == state_bits(longer)
        assert resumed_notes(tmp_path / f"from-{step}") == [f"from step {step}"]


def test_a_run_is_shortened_but_not_below_what_is_done(tmp_path: Path) -> None:
    tiny(tmp_path, steps=8, save_every=3, keep_last=0, lr_scheduler="linear").train()
    source = str(tmp_path / "t-state" / "step-000003")
    done = tiny(tmp_path / "b", steps=5, lr_scheduler="linear", resume=source).train()
    assert done.step == 5 and "the run is shortened from 8 to 5 steps" in resumed_notes(tmp_path / "b")
    with pytest.raises(ConfigError, match="steps: 8 steps are done, and 5 are set; set more of them"):
        tiny(tmp_path, steps=5, lr_scheduler="linear").resume("auto")


def test_epochs_extend_a_run_too(tmp_path: Path) -> None:
    tiny(tmp_path, steps=None, epochs=1).train()
    assert tiny(tmp_path, steps=None, epochs=3, resume="auto").train().step == 15


def test_settings_without_effect_may_change(tmp_path: Path) -> None:
    straight = tiny(tmp_path / "straight", steps=4).train()
    tiny(tmp_path / "a", steps=2).train()
    other: dict[str, Any] = {
        "text_encoder_learning_rate": 1e-5, "polynomial_power": 2.0, "huber_c": 0.5, "huber_schedule": "snr",
        "multires_noise_discount": 0.9, "keep_tokens": 3, "loss": "mse", "keep_every": 7, "save_every_epochs": 2,
    }  # fmt: skip
    assert file_bits(tiny(tmp_path / "a", steps=4, resume=True, **other).train().path) == file_bits(straight.path)
    with pytest.raises(ConfigError) as caught:
        tiny(
            tmp_path / "a", steps=6, loss="huber", huber_c=0.2, huber_schedule="snr", warmup=5, scale_weight_norms=1.0
        ).resume("auto")
    assert sorted(str(problem).split(":")[0] for problem in caught.value.problems) == [
        "huber_c", "loss", "scale_weight_norms", "warmup",
    ]  # fmt: skip


def test_a_checkpoint_from_before_a_setting_had_its_default(tmp_path: Path) -> None:
    tiny(tmp_path, steps=2).train()
    state = load_state(checkpoints(tmp_path / "t-state")[0])
    for name in ("loss", "scale_weight_norms", "loraplus_lr_ratio", "betas", "caption_extensions"):
        del state.facts["config"][name]
    run = tiny(tmp_path, steps=3)
    assert ensure_resumable(state.facts, run._facts(), run.config, 2) == ["the run is extended from 2 to 3 steps"]
