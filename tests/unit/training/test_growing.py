"""Runs that grow: saved by steps or epochs, with milestones, and every setting resumes to the same bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from inweave.errors import ConfigError
from inweave.layers import lora_layers
from inweave.training.checkpoint.resume import ensure_resumable
from inweave.training.checkpoint.store import checkpoints, load_state
from inweave.training.data.intervals import Interval
from inweave.training.loop import Run
from inweave.training.optim.schedules import learning_rate
from inweave.training.output.samples import SampleImage
from tests.unit.training.tiny import EVERYTHING, file_bits, log, state_bits, tiny


@pytest.mark.parametrize(
    ("network", "settings"),
    [("lora", {"scale_weight_norms": 0.05, "loraplus_lr_ratio": 16.0}), ("loha", {"scale_weight_norms": 0.05})],
)
def test_a_run_with_it_resumes_to_the_same_bits(network: str, settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**EVERYTHING, **settings, "network": network, "steps": 5}
    straight = tiny(tmp_path / "straight", save_every=1, keep_last=0, **settings)
    done = straight.train()
    plain = tiny(tmp_path / "plain", **{**EVERYTHING, "network": network, "steps": 5}).train()
    assert file_bits(done.path) != file_bits(plain.path), "the setting changes something"
    for step in (1, 3):
        source = str(tmp_path / "straight" / "t-state" / f"step-{step:06d}")
        run = tiny(tmp_path / f"from-{step}", resume=source, **settings)
        assert file_bits(run.train().path) == file_bits(done.path) and state_bits(run) == state_bits(straight)


def norms(run: Run) -> list[float]:
    """|scale * product| of every module, in float64."""
    sizes = []
    for layer in lora_layers(run.task.networks["model"]).values():
        branch = layer.branch("trained")
        roles = {role: value.detach().double() for role, value in branch.roles().items()}
        product = (
            roles["up"] @ roles["down"]
            if "up" in roles
            else (roles["w1_a"] @ roles["w1_b"]) * (roles["w2_a"] @ roles["w2_b"])
        )
        sizes.append(float((product * branch.scale).norm()))
    return sizes


@pytest.mark.parametrize("network", ["lora", "dora", "loha"])
def test_no_module_changes_by_more_than_the_norm(network: str, tmp_path: Path) -> None:
    free = tiny(tmp_path / "free", network=network, alpha=1.0)
    free.train()
    limit = 0.5 * min(norms(free))
    limited = tiny(tmp_path / "limited", network=network, alpha=1.0, scale_weight_norms=limit)
    limited.train()
    assert min(norms(free)) > limit and norms(limited) == pytest.approx([limit, limit], rel=1e-4)
    above = tiny(tmp_path / "above", network=network, alpha=1.0, scale_weight_norms=1e6)
    above.train()
    assert torch.equal(above.flat.values, free.flat.values), "a limit that nothing reaches changes no bit"


def test_one_step_beyond_the_norm_scales_both_factors_alike(tmp_path: Path) -> None:
    free, limited = (tiny(tmp_path / str(s), scale_weight_norms=s, steps=2) for s in (0.0, 1e-4))
    for run in (free, limited):
        run.train_step()
        ratio = torch.tensor(1e-4 / norms(free)[0]).sqrt()
    names = [name for name in free.flat.parameters if "to_q" in name]
    for name in names:
        torch.testing.assert_close(
            limited.flat.parameters[name].detach(), free.flat.parameters[name].detach() * ratio, rtol=1e-4, atol=1e-8
        )


def test_a_skipped_step_scales_nothing(tmp_path: Path) -> None:
    run = tiny(tmp_path, scale_weight_norms=0.0, steps=4)
    run.train_step()
    run.config = run.step.config = run.config.model_copy(update={"scale_weight_norms": 1e-6})
    before = run.flat.values.clone()
    run.task.poison = "nan"
    run.train_step()
    assert torch.equal(run.flat.values, before)
    run.task.poison = ""
    run.train_step()
    assert max(norms(run)) == pytest.approx(1e-6, rel=1e-3)


def test_loraplus_multiplies_the_rate_of_the_up_factors(tmp_path: Path) -> None:
    run = tiny(tmp_path, loraplus_lr_ratio=16.0, rules=[{"pattern": "to_k", "learning_rate": 0.1}])
    rates = {name.removeprefix("model."): 0.05 * factor for name, factor in run.flat.factors.items()}
    assert rates == pytest.approx({"to_q.down": 0.05, "to_q.up": 0.8, "to_k.down": 0.1, "to_k.up": 1.6})


def test_a_first_step_of_adam_moves_by_the_rate(tmp_path: Path) -> None:
    """Adam's first step has the size of the learning rate, whatever the gradient."""
    run = tiny(tmp_path, loraplus_lr_ratio=4.0, weight_decay=0.0)
    before = {name: value.detach().clone() for name, value in run.flat.parameters.items()}
    run.train_step()
    for name, value in run.flat.parameters.items():
        moved = (value.detach() - before[name]).abs().max()
        expected = 0.0 if name.endswith("down") else 0.2  # `up` is zero at first, and so is the gradient of `down`
        assert float(moved) == pytest.approx(expected, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loraplus_lr_ratio": 4.0, "network": "loha"}, "LoRA+ is for lora, locon and dora"),
        ({"loraplus_lr_ratio": 4.0, "optimizer": "prodigy"}, "estimates one learning rate"),
        ({"scale_weight_norms": 1.0, "optimizer": "schedulefree"}, "saves an average"),
        (
            {"text_encoder_stop": 5, "train_text_encoders": True, "optimizer": "schedulefree"},
            "which goes on changing",
        ),
        ({"validate_every": 5}, "set validation_split"),
        ({"validate_every_epochs": 1}, "set validation_split"),
        ({"min_timestep": 5, "max_timestep": 5}, "is not above min_timestep"),
    ],
)
def test_settings_that_do_nothing_together_are_refused(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(tmp_path, **settings)
    assert message in str(caught.value)


# longer and shorter


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


# intervals


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


# what is kept


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


# the running average


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
    run.progress.load([7.0] * 50 + [1.0] * 99 + [float("nan")])
    assert run.progress.average == 1.0
