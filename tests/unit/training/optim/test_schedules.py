"""Learning-rate schedules: their formulas, and what happens at every edge."""

from __future__ import annotations

import math

import pytest

from inweave.errors import ConfigError
from inweave.training.optim.schedules import KINDS, learning_rate, warmup_steps


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
