"""Losses, noise and weights against their formulas in float64, written independently."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

import torch  # noqa: E402
from diffusers.training_utils import compute_snr  # noqa: E402

from inweave.errors import ConfigError  # noqa: E402
from inweave.training.tasks.losses import image_loss  # noqa: E402
from inweave.training.tasks.objective import Objective, make_objective  # noqa: E402
from tests.unit.training.tasks.test_objective import CPU, SCHEDULES, model  # noqa: E402

ALPHAS = diffusers.DDPMScheduler(**SCHEDULES["sd"]).alphas_cumprod


def pair(seed: int = 0, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prediction, target = (torch.randn(rows, 4, 6, 5, generator=generator) for _ in range(2))
    return prediction * torch.tensor([0.01, 1.0, 30.0])[:rows].reshape(-1, 1, 1, 1), target


def expected_loss(kind: str, c: Any, prediction: torch.Tensor, target: torch.Tensor) -> np.ndarray[Any, Any]:
    """One number per image."""
    d = (prediction.double() - target.double()).numpy()
    c = np.broadcast_to(np.asarray(c, dtype=np.float64), (len(d),)).reshape(-1, 1, 1, 1)
    error = {
        "mse": d**2, "l1": np.abs(d), "huber": 2 * c * (np.hypot(d, c) - c), "smooth_l1": 2 * (np.hypot(d, c) - c),
    }[kind]  # fmt: skip
    return error.reshape(len(d), -1).mean(1)


@pytest.mark.parametrize("schedule", ["constant", "exponential", "snr"])
@pytest.mark.parametrize("kind", ["mse", "l1", "huber", "smooth_l1"])
def test_a_loss_is_its_formula(kind: str, schedule: str) -> None:
    prediction, target = pair()
    times = torch.tensor([3, 500, 990])
    sigma = ((1 - ALPHAS[times].double()) / ALPHAS[times].double()).sqrt().numpy()
    c = {
        "constant": 0.2,
        "exponential": np.exp(math.log(0.2) / 1000 * times.double().numpy()),
        "snr": (1 - 0.2) / (1 + sigma) ** 2 + 0.2,
    }[schedule]
    objective = Objective("epsilon", ALPHAS, loss=kind, huber_c=0.2, huber_schedule=schedule)
    expected = expected_loss(kind, c, prediction, target)
    loss = objective.loss_of(prediction, target, times, None, None)
    assert float(loss) == pytest.approx(expected.mean(), rel=1e-4)
    weights = torch.tensor([1.0, 0.5, 0.0])
    weighted = objective.loss_of(prediction, target, times, weights, None)
    assert float(weighted) == pytest.approx((expected * weights.numpy()).mean(), rel=1e-4)
    mask = torch.zeros(3, 1, 6, 5)
    mask[:, :, :2] = 1
    masked = objective.loss_of(prediction, target, times, None, mask)
    part = expected_loss(kind, c, prediction[:, :, :2], target[:, :, :2]).mean()
    assert float(masked) == pytest.approx(part, rel=1e-4)


def test_huber_is_the_square_near_zero_and_a_line_far_away() -> None:
    zero = torch.zeros(1, 1, 1, 1)
    for kind, slope in (("huber", 0.2), ("smooth_l1", 2.0)):
        values = [
            float(image_loss(zero + d, zero, None, None, kind=kind, thresholds=torch.tensor([0.1])))
            for d in (0.003, 1000.0, 1001.0)
        ]
        assert values[0] == pytest.approx(0.003**2 / (1 if kind == "huber" else 0.1), rel=1e-2)
        assert values[2] - values[1] == pytest.approx(slope, rel=1e-2)


def test_the_mean_squared_error_has_the_bits_it_always_had() -> None:
    prediction, target = pair()
    before = (prediction - target).square().flatten(1).mean(1).mean()
    assert torch.equal(image_loss(prediction, target, None, None), before)
    objective = Objective("epsilon", ALPHAS)
    assert torch.equal(objective.loss_of(prediction, target, torch.tensor([1, 2, 3]), None, None), before)
    times = objective.draw_times(64, 0, torch.Generator().manual_seed(1))
    assert torch.equal(times, torch.randint(1000, (64,), generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("gamma", [None, 5.0])
def test_debiased_estimation(kind: str, gamma: float | None) -> None:
    """1 / sqrt(SNR), or 1 / (SNR + 1), with SNR at most 1000; min-SNR multiplies it."""
    times = torch.arange(1000)
    snr = compute_snr(diffusers.DDPMScheduler(**SCHEDULES["sd"]), times).double()
    capped = snr.clamp(max=1000)
    expected = 1 / capped.sqrt() if kind == "epsilon" else 1 / (capped + 1)
    if gamma:
        expected = expected * snr.clamp(max=gamma) / (snr if kind == "epsilon" else snr + 1)
    weights = Objective(kind, ALPHAS, min_snr_gamma=gamma, debiased_estimation=True).weights(times)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-4, atol=0)
    assert (snr > 1000).any() and Objective("flow", None, debiased_estimation=True).weights(times) is None


def test_an_infinite_weight_is_refused() -> None:
    zero = model(**SCHEDULES["zero"])
    with pytest.raises(ConfigError, match=r"debiased_estimation: .*zero terminal SNR.*max_timestep = 999"):
        make_objective(zero, "auto", CPU, debiased_estimation=True)
    made = make_objective(zero, "auto", CPU, debiased_estimation=True, max_timestep=999)
    assert bool(made.weights(torch.arange(999)).isfinite().all())
    make_objective(zero, "v_prediction", CPU, debiased_estimation=True)


@pytest.mark.parametrize(("first", "end"), [(None, 300), (700, None), (200, 201), (100, 900)])
def test_timesteps_stay_within_their_limits(first: int | None, end: int | None) -> None:
    low, high = first or 0, end or 1000
    limits: dict[str, Any] = {"min_timestep": first, "max_timestep": end}
    times = Objective("epsilon", ALPHAS, **limits).draw_times(4000, 0, torch.Generator().manual_seed(1))
    assert int(times.min()) >= low and int(times.max()) < high and times.dtype == torch.int64
    assert float(times.double().mean()) == pytest.approx((low + high - 1) / 2, abs=0.05 * (high - low) + 1e-9)
    for sampling in ("uniform", "shift"):
        free, limited = (
            Objective("flow", None, timesteps=sampling, shift=3.0, **each).draw_times(
                500, 0, torch.Generator().manual_seed(1)
            )
            for each in ({}, limits)
        )
        torch.testing.assert_close(limited.double(), (low + (high - low) * free.double()) / 1000, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "limits", [{"min_timestep": 1000}, {"max_timestep": 1001}, {"min_timestep": 5, "max_timestep": 5}]
)
def test_limits_that_leave_no_timestep_are_refused(limits: dict[str, int]) -> None:
    for which in (model(**SCHEDULES["sd"]), model("FlowMatchEulerDiscreteScheduler", "sd3")):
        with pytest.raises(ConfigError, match=r"min_timestep, max_timestep: .* leaves no timestep"):
            make_objective(which, "auto", CPU, **limits)


def test_a_flow_has_no_signal_to_noise_schedule() -> None:
    with pytest.raises(ConfigError, match="huber_schedule"):
        make_objective(model("FlowMatchEulerDiscreteScheduler", "sd3"), "auto", CPU, loss="huber", huber_schedule="snr")


def multires(shape: tuple[int, ...], iterations: int, discount: float, seed: int) -> torch.Tensor:
    """Multi-resolution noise in float64, from the same random numbers."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(shape, generator=generator).double()
    _, channels, height, width = shape
    for i in range(iterations):
        r = 2 + 2 * torch.rand((), generator=generator, dtype=torch.float64).item()
        h, w = max(1, int(height / r**i)), max(1, int(width / r**i))
        small = torch.randn(1, channels, h, w, generator=generator).double()
        up = torch.nn.Upsample(size=(height, width), mode="bilinear")
        noise += up(small) * discount**i
        if h == 1 or w == 1:
            break
    return noise / noise.std()


@pytest.mark.parametrize("iterations", [1, 2, 6, 2**31 - 1])
def test_multires_noise(iterations: int) -> None:
    shape = (1, 4, 64, 48)
    objective = Objective("epsilon", ALPHAS, multires_noise_iterations=iterations, multires_noise_discount=0.5)
    noise = objective.draw_noise(shape, torch.Generator().manual_seed(3))
    torch.testing.assert_close(noise.double(), multires(shape, iterations, 0.5, 3), rtol=1e-4, atol=1e-5)
    assert float(noise.std()) == pytest.approx(1.0, abs=1e-5)
    plain = Objective("epsilon", ALPHAS).draw_noise(shape, torch.Generator().manual_seed(3))
    assert torch.equal(plain, torch.randn(shape, generator=torch.Generator().manual_seed(3)))
    coarse, fine = (torch.nn.functional.avg_pool2d(each, 8).std() for each in (noise, plain))
    assert iterations == 1 or float(coarse) > 1.3 * float(fine), "low frequencies are stronger"
