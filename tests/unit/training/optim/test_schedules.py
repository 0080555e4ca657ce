"""Learning-rate schedules: their formulas, and what happens at every edge."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from inweave.errors import ConfigError
from inweave.training.config.fields import TORCH_SCHEDULERS
from inweave.training.config.schema import TrainConfig
from inweave.training.optim.schedules import KINDS, learning_rate, learning_rate_at, warmup_steps


@pytest.mark.parametrize("kind", KINDS)
def test_edges_without_warmup(kind: str) -> None:
    assert learning_rate(0, 100, kind) == 1.0
    last = learning_rate(99, 100, kind)
    assert 0 < last <= 1, "the last step still moves"
    assert learning_rate(100, 100, kind) == pytest.approx(1.0 if kind == "constant" else 0.0, abs=1e-15)
    assert learning_rate(0, 1, kind) == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [1, 10, 0.1, 0.999 * 0.2])
def test_warmup_rises_to_one_and_is_never_zero(kind: str, warmup: float) -> None:
    warm = warmup_steps(100, warmup)
    rates = [learning_rate(step, 100, kind, warmup) for step in range(100)]
    assert rates[:warm] == [(step + 1) / warm for step in range(warm)]
    assert rates[warm - 1] == rates[warm] == 1.0
    assert all(0 < rate <= 1 for rate in rates)


def test_a_fraction_and_its_steps_are_the_same() -> None:
    assert warmup_steps(200, 0.05) == warmup_steps(200, 10) == warmup_steps(200, 10.0) == 10
    assert warmup_steps(100, 0.29) == 29, "0.29 * 100 is just below 29"
    assert warmup_steps(3, 0.1) == 0


def test_formulas() -> None:
    for step in range(10, 110):
        t = (step - 10) / 100
        assert learning_rate(step, 110, "linear", 10) == pytest.approx(1 - t)
        assert learning_rate(step, 110, "polynomial", 10, power=2.5) == pytest.approx((1 - t) ** 2.5)
        assert learning_rate(step, 110, "cosine", 10) == pytest.approx((1 + math.cos(math.pi * t)) / 2)
        assert learning_rate(step, 110, "constant", 10) == 1.0
        assert learning_rate(step, 110, "rex", 10) == pytest.approx((1 - t) / (0.1 + 0.9 * (1 - t)))
        assert learning_rate(step, 110, "linear", 10, low=0.2) == pytest.approx(0.2 + 0.8 * (1 - t))


def _config(**settings: Any) -> TrainConfig:
    return TrainConfig.of(model="m", dataset="d", **settings)


TORCH: dict[str, dict[str, Any]] = {
    "ConstantLR": {"factor": 0.5, "total_iters": 4}, "CosineAnnealingLR": {"T_max": 7, "eta_min": 4e-7},
    "CosineAnnealingWarmRestarts": {"T_0": 5, "T_mult": 2}, "ExponentialLR": {"gamma": 0.9},
    "CyclicLR": {"base_lr": 1e-5, "max_lr": 1e-4, "step_size_up": 3, "cycle_momentum": False},
    "LinearLR": {"start_factor": 0.1, "total_iters": 9}, "MultiStepLR": {"milestones": [3, 11], "gamma": 0.1},
    "OneCycleLR": {"max_lr": 2e-4, "total_steps": 40, "cycle_momentum": False},
    "PolynomialLR": {"total_iters": 30, "power": 2.0}, "StepLR": {"step_size": 6, "gamma": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("name", TORCH)
def test_schedulers_of_torch_give_the_rates_of_torch(name: str, warmup: int) -> None:
    config = _config(learning_rate=1e-4, steps=30, warmup=warmup, lr_scheduler=name, lr_scheduler_args=TORCH[name])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-4)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **TORCH[name])
    for step in range(30):
        if step < warmup:
            assert learning_rate_at(config, step, 30) == (step + 1) / warmup
            continue
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate_at(config, step, 30) * 1e-4 == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_every_scheduler_of_torch_is_tried() -> None:
    assert {name.rpartition(".")[2] for name in TORCH_SCHEDULERS} == TORCH.keys()


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("StepLR", {}, "step_size"), ("StepLR", {"step_size": 3, "nonsense": 1}, "nonsense"),
        ("OneCycleLR", {"max_lr": 1e-3}, "cycle_momentum = false"), ("ExponentialLR", {"gamma": -1.0}, "negative"),
        ("OneCycleLR", {"max_lr": 1e-3, "total_steps": 5, "cycle_momentum": False}, "after 6 steps of 30"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_named(name: str, arguments: dict[str, Any], why: str) -> None:
    config = _config(steps=30, lr_scheduler=name, lr_scheduler_args=arguments)
    with pytest.raises(ConfigError, match=why):
        learning_rate_at(config, 0, 30)


def test_arguments_need_a_scheduler_that_has_them() -> None:
    with pytest.raises(ConfigError, match=r"lr_scheduler_args: are those of a class"):
        _config(steps=3, lr_scheduler_args={"gamma": 0.1})
    with pytest.raises(ConfigError, match=r"lr_min_ratio: .* has its own"):
        _config(steps=3, lr_min_ratio=0.1, lr_scheduler="StepLR", lr_scheduler_args={"step_size": 2})


@pytest.mark.parametrize("restarts", [1, 2, 7, 49])
def test_cosine_restarts_at_full_rate(restarts: int) -> None:
    total = restarts * 20
    for turn in range(restarts):
        cycle = [learning_rate(turn * 20 + k, total, "cosine", restarts=restarts) for k in range(20)]
        assert cycle == pytest.approx([(1 + math.cos(math.pi * k / 20)) / 2 for k in range(20)])
    assert learning_rate(total, total, "cosine", restarts=restarts) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("warmup", [100, 101, -1, 1.5, -0.5, 0.999, math.inf, math.nan])
def test_a_warmup_that_leaves_nothing_is_an_error(warmup: float) -> None:
    with pytest.raises(ConfigError, match="warmup"):
        learning_rate(0, 100, "linear", warmup)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        learning_rate(101, 100, "sine", 0, 0, 0.0)
    assert [word for word in ("'sine'", "step", "restarts", "power") if word in str(caught.value)] == [
        "'sine'", "step", "restarts", "power",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="at least 1 step"):
        learning_rate(0, 0)


def test_the_warmup_of_a_preset_takes_half_of_a_shorter_run() -> None:
    config = TrainConfig.of(dataset="d", model="m", steps=4, lr_scheduler="constant").with_preset("inweave/emoji")
    assert config.warmup == 20
    assert [learning_rate_at(config, step, 4) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    with pytest.raises(ConfigError, match="warmup must leave steps to train"):
        learning_rate_at(TrainConfig.of(dataset="d", model="m", warmup=20), 0, 4)
