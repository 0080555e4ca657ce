"""The target of the denoiser is that of diffusers' schedulers, samples have the moments of their formulas, and the
loss has the gradient it should.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

import torch  # noqa: E402
from diffusers.pipelines.flux.pipeline_flux import calculate_shift  # noqa: E402
from diffusers.training_utils import compute_snr  # noqa: E402
from torch import nn  # noqa: E402

from inweave.errors import ConfigError  # noqa: E402
from inweave.models.families import family_named  # noqa: E402
from inweave.models.samplers import DynamicShift  # noqa: E402
from inweave.training.tasks.losses import image_loss  # noqa: E402
from inweave.training.tasks.objective import Objective, make_objective  # noqa: E402

CPU = torch.device("cpu")
SCHEDULES: dict[str, dict[str, Any]] = {
    "sd": {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"},
    "zero": {
        "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "rescale_betas_zero_snr": True,
    },
}  # fmt: skip
DRAWS = 40_000


def model(scheduler: str = "DDPMScheduler", family: str = "sd", **config: Any) -> Any:
    """As much of a model as an objective looks at."""
    schedule = getattr(diffusers, scheduler)(**config)
    flow = family in ("sd3", "flux")
    prediction = "flow" if flow else schedule.config.prediction_type
    return SimpleNamespace(
        scheduler=schedule, flow=flow, family=family_named(family), name="a model", prediction=prediction
    )


def noise_and_all(count: int = 1000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(count, 4, 2, 3), torch.randn(count, 4, 2, 3), torch.arange(1000)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_diffusion_is_ddpm(schedule: str, kind: str) -> None:
    ddpm = diffusers.DDPMScheduler(**SCHEDULES[schedule], prediction_type=kind)
    latents, noise, times = noise_and_all()
    objective = make_objective(model(**SCHEDULES[schedule], prediction_type=kind), "auto", CPU)
    noisy, target = objective.noised(latents, noise, times)
    torch.testing.assert_close(noisy, ddpm.add_noise(latents, noise, times))
    expected = noise if kind == "epsilon" else ddpm.get_velocity(latents, noise, times)
    torch.testing.assert_close(target, expected)
    assert torch.equal(objective.timestep(times), times)
    if schedule == "zero":
        assert torch.equal(noisy[-1], noise[-1]), "the last step is pure noise"
    else:
        assert not torch.equal(noisy[-1], noise[-1])


@pytest.mark.parametrize("sampler", ["EulerDiscreteScheduler", "DDIMScheduler", "PNDMScheduler", "DDPMScheduler"])
def test_the_schedule_is_that_of_training_whatever_samples(sampler: str) -> None:
    """Euler bends the last step of a zero terminal SNR, and PNDM knows none."""
    options = SCHEDULES["sd" if sampler == "PNDMScheduler" else "zero"]
    objective = make_objective(model(sampler, **options), "auto", CPU)
    assert objective.alphas is not None
    assert torch.equal(objective.alphas, diffusers.DDPMScheduler(**options).alphas_cumprod)


def test_flow_is_scale_noise() -> None:
    latents, noise, _ = noise_and_all(50)
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    flow.set_timesteps(50)
    objective = make_objective(model("FlowMatchEulerDiscreteScheduler", "sd3"), "auto", CPU)
    levels = flow.sigmas[:50]
    noisy, target = objective.noised(latents, noise, levels)
    torch.testing.assert_close(noisy, flow.scale_noise(latents, flow.timesteps, noise))
    torch.testing.assert_close(objective.timestep(levels), flow.timesteps)
    torch.testing.assert_close(target, noise - latents)
    # a whole step along the target leads from the noised latents to the clean ones
    torch.testing.assert_close(noisy - levels.reshape(-1, 1, 1, 1) * target, latents, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_min_snr(kind: str, gamma: float) -> None:
    ddpm = diffusers.DDPMScheduler(**SCHEDULES["sd"])
    times = torch.arange(1000)
    snr = compute_snr(ddpm, times)
    expected = torch.minimum(snr, torch.full_like(snr, gamma)) / (snr if kind == "epsilon" else snr + 1)
    weights = Objective(kind, ddpm.alphas_cumprod, min_snr_gamma=gamma).weights(times)
    assert weights is not None
    torch.testing.assert_close(weights, expected)
    assert weights.min() < 0.5 * weights.max()


def test_min_snr_of_pure_noise_is_its_limit() -> None:
    alphas = diffusers.DDPMScheduler(**SCHEDULES["zero"]).alphas_cumprod
    last = torch.tensor([999])
    for kind, expected in (("epsilon", 1.0), ("v_prediction", 0.0)):
        assert Objective(kind, alphas, min_snr_gamma=5.0).weights(last).tolist() == [expected]
    assert Objective("epsilon", alphas).weights(last) is None
    assert Objective("flow", None, min_snr_gamma=5.0).weights(last) is None


def test_offset_noise() -> None:
    plain, moved = (
        Objective("epsilon", None, noise_offset=size).draw_noise((500, 4, 16, 16), torch.Generator().manual_seed(1))
        for size in (0.0, 0.5)
    )
    shift = moved - plain
    assert torch.allclose(shift, shift[..., :1, :1], atol=1e-6), "one number per channel"
    assert shift[:, :, 0, 0].std() == pytest.approx(0.5, rel=0.05)
    assert shift[:, :, 0, 0].flatten().unique().numel() == 500 * 4
    assert plain.std() == pytest.approx(1.0, rel=0.01)


def sample_times(tokens: int = 1024, **options: Any) -> torch.Tensor:
    times = Objective("flow", None, **options).draw_times(DRAWS, tokens, torch.Generator().manual_seed(2))
    assert times.min() >= 0 and times.max() <= 1
    return times.double()


def test_uniform_times() -> None:
    level = sample_times(timesteps="uniform")
    assert level.mean() == pytest.approx(0.5, abs=0.01) and level.var() == pytest.approx(1 / 12, rel=0.02)
    steps = Objective("epsilon", torch.ones(1000)).draw_times(DRAWS, 0, torch.Generator().manual_seed(2))
    assert steps.dtype == torch.int64 and (int(steps.min()), int(steps.max())) == (0, 999)
    assert steps.double().mean() == pytest.approx(499.5, rel=0.01)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.7, 1.0), (-0.5, 0.4)])
def test_logit_normal_times(mean: float, std: float) -> None:
    logits = torch.logit(sample_times(timesteps="logit_normal", logit_mean=mean, logit_std=std))
    assert logits.mean() == pytest.approx(mean, abs=0.02) and logits.std() == pytest.approx(std, rel=0.02)
    skewness = ((logits - logits.mean()) ** 3).mean() / logits.std() ** 3
    assert abs(float(skewness)) < 0.05


def test_sigmoid_times_have_no_mean() -> None:
    logits = torch.logit(sample_times(timesteps="sigmoid", logit_mean=0.7, logit_std=1.5))
    assert logits.mean() == pytest.approx(0.0, abs=0.03) and logits.std() == pytest.approx(1.5, rel=0.02)


def test_a_shift_moves_the_logit_by_its_logarithm() -> None:
    """f s / (1 + (f - 1) s) has the logit of s plus log f; it is what diffusers does to noise levels."""
    plain, shifted = sample_times(timesteps="sigmoid"), sample_times(timesteps="shift", shift=3.0)
    torch.testing.assert_close(torch.logit(shifted), torch.logit(plain) + math.log(3), rtol=1e-3, atol=1e-3)
    flow = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    flow.set_timesteps(sigmas=plain[:100].sort(descending=True).values.numpy())
    torch.testing.assert_close(
        flow.sigmas[:100].double(), shifted[:100].sort(descending=True).values, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["uniform", "logit_normal"])
def test_a_shift_that_is_set_moves_other_times_too(kind: str) -> None:
    plain, shifted = (
        sample_times(timesteps=kind, logit_mean=0.5),
        sample_times(timesteps=kind, logit_mean=0.5, shift=3.0),
    )
    torch.testing.assert_close(shifted, 3 * plain / (1 + 2 * plain), rtol=1e-5, atol=1e-6)
    sd3 = model("FlowMatchEulerDiscreteScheduler", "sd3", shift=3.0)
    assert make_objective(sd3, "auto", CPU, timesteps=kind).shift is None, "only a setting shifts them"


def test_sigma_weighting_is_the_loss_of_images() -> None:
    """With x = z + s (e - z): the loss of x - s * prediction against z is s^2 times that against e - z."""
    generator = torch.Generator().manual_seed(0)
    latents, noise, prediction = (torch.randn(3, 4, 8, 8, generator=generator) for _ in range(3))
    times = torch.tensor([0.1, 0.5, 0.9])
    objective = Objective("flow", None, sigma_weighting=2.0)
    noisy, target = objective.noised(latents, noise, times)
    weighted = objective.loss_of(prediction, target, times, objective.weights(times), None)
    images = (noisy - times.reshape(-1, 1, 1, 1) * prediction - latents).square().mean()
    torch.testing.assert_close(weighted, images, rtol=1e-5, atol=1e-6)
    assert Objective("flow", None).weights(times) is None


def test_weights_by_timestep_are_a_curve_of_mean_one() -> None:
    """The weight of t = 1 .. 1000 is that of the interval of noise levels that ends there."""
    flow = model("FlowMatchEulerDiscreteScheduler", "sd3")
    weighted = make_objective(flow, "auto", CPU, timesteps="uniform", weighting="ai-toolkit")
    weights = weighted.weights(torch.arange(1, 1001) / 1000)
    assert weights is not None and float(weights.mean()) == pytest.approx(1, abs=1e-3)
    assert [round(float(weights[t - 1]), 3) for t in (1000, 999, 876, 1)] == [0.906, 0.910, 1.523, 0.447]
    levels = torch.tensor([0.0, 0.0004, 0.00101, 0.5, 1.0])
    some = weighted.weights(levels)
    assert some is not None and torch.equal(some, weights[torch.tensor([0, 0, 1, 499, 999])])
    both = make_objective(flow, "auto", CPU, weighting="ai-toolkit", sigma_weighting=2.0).weights(levels)
    assert both is not None
    torch.testing.assert_close(both, some * levels**2)
    with pytest.raises(ConfigError, match="timestep_weighting: is for flow matching"):
        make_objective(model(), "auto", CPU, weighting="ai-toolkit")


@pytest.mark.parametrize("tokens", [64, 256, 1024, 4096, 9216])
def test_flux_shifts_by_size(tokens: int) -> None:
    dev = model("FlowMatchEulerDiscreteScheduler", "flux", use_dynamic_shifting=True)
    objective = make_objective(dev, "auto", CPU)
    assert objective.timesteps == "shift" and objective.shift is None
    mu = calculate_shift(tokens)
    assert objective.dynamic_shift.mu(tokens) == pytest.approx(mu)
    plain = sample_times(timesteps="sigmoid")
    level = objective.draw_times(DRAWS, tokens, torch.Generator().manual_seed(2)).double()
    torch.testing.assert_close(level, math.exp(mu) / (math.exp(mu) + (1 / plain - 1)), rtol=1e-4, atol=1e-5)
    flow = dev.scheduler
    flow.set_timesteps(sigmas=plain[:50].sort(descending=True).values.numpy(), mu=mu)
    torch.testing.assert_close(flow.sigmas[:50].double(), level[:50].sort(descending=True).values, rtol=1e-4, atol=1e-5)


def test_the_line_is_the_models_own() -> None:
    dev = model("FlowMatchEulerDiscreteScheduler", "flux", use_dynamic_shifting=True, base_shift=0.2, max_shift=2.0)
    assert make_objective(dev, "auto", CPU).dynamic_shift == DynamicShift((256, 4096), (0.2, 2.0))
    schnell = model("FlowMatchEulerDiscreteScheduler", "flux", shift=1.0)
    assert make_objective(schnell, "auto", CPU).shift == 1.0, "schnell was never shifted by size"
    sd3 = model("FlowMatchEulerDiscreteScheduler", "sd3", shift=3.0)
    assert make_objective(sd3, "auto", CPU, timesteps="shift").shift == 3.0
    assert make_objective(sd3, "auto", CPU, shift=2.0).timesteps == "shift", "an explicit shift is used"
    assert make_objective(sd3, "auto", CPU).timesteps == "logit_normal"


def test_what_does_not_fit_a_model() -> None:
    sd, sd3 = model(**SCHEDULES["sd"]), model("FlowMatchEulerDiscreteScheduler", "sd3")
    for which, prediction, options in (
        (sd, "flow", {}), (sd3, "epsilon", {}), (sd, "auto", {"timesteps": "shift"}),
        (model(**SCHEDULES["sd"], prediction_type="sample"), "auto", {}),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            make_objective(which, prediction, CPU, **options)
    assert make_objective(sd, "v_prediction", CPU).kind == "v_prediction"


def test_a_mask_counts_only_its_open_part() -> None:
    torch.manual_seed(3)
    prediction, target = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6)
    mask = torch.zeros(2, 1, 6, 6)
    mask[0, :, :2], mask[1, :, 4:, 4:] = 1.0, 1.0
    loss = image_loss(prediction, target, None, mask)
    parts = [(prediction - target)[0, :, :2].square().mean(), (prediction - target)[1, :, 4:, 4:].square().mean()]
    torch.testing.assert_close(loss, torch.stack(parts).mean())
    other = torch.where(mask.bool(), prediction, 1000 * torch.randn_like(prediction))
    assert torch.equal(image_loss(other, target, None, mask), loss)
    assert not torch.equal(image_loss(other, target, None, None), image_loss(prediction, target, None, None))
    prediction.requires_grad_()
    image_loss(prediction, target, None, mask).backward()
    assert prediction.grad is not None and bool((prediction.grad[(mask == 0).expand_as(prediction)] == 0).all())
    torch.testing.assert_close(
        image_loss(prediction, target, None, torch.ones_like(mask)), image_loss(prediction, target, None, None)
    )
    assert float(image_loss(prediction, target, None, torch.zeros_like(mask))) == 0.0, (
        "a closed mask teaches nothing, and breaks nothing"
    )


def test_loss_weights_apply_per_image() -> None:
    torch.manual_seed(4)
    prediction, target = torch.randn(3, 4, 2, 2), torch.randn(3, 4, 2, 2)
    each = [image_loss(prediction[i : i + 1], target[i : i + 1], None, None) for i in range(3)]
    loss = image_loss(prediction, target, torch.tensor([1.0, 0.5, 0.0]), None)
    torch.testing.assert_close(loss, (each[0] + 0.5 * each[1]) / 3)


def test_the_loss_of_half_precision_is_computed_in_float32() -> None:
    prediction, target = torch.full((1, 1, 64, 64), 300.0), torch.zeros(1, 1, 64, 64)
    assert float(image_loss(prediction.half(), target.half(), None, None)) == 90000.0, "float16 ends at 65504"


class Denoiser(nn.Module):
    """Two layers that also hear the time, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a = nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64)
        self.b = nn.Conv2d(3, 2, 1, dtype=torch.float64)

    def forward(self, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.b(torch.tanh(self.a(noisy) + time.double().reshape(-1, 1, 1, 1) / 1000))
        return output


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gamma", [None, 5.0])
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "flow"])
def test_gradients_are_finite_differences(kind: str, gamma: float | None, masked: bool) -> None:
    flow = kind == "flow"
    alphas = None if flow else diffusers.DDPMScheduler(**SCHEDULES["zero"]).alphas_cumprod.double()
    objective = Objective(kind, alphas, min_snr_gamma=gamma)
    network = Denoiser()
    generator = torch.Generator().manual_seed(6)
    latents, noise = (torch.randn(2, 2, 3, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    times = torch.tensor([0.3, 0.9], dtype=torch.float64) if flow else torch.tensor([200, 999])
    mask = torch.rand(2, 1, 3, 3, generator=generator, dtype=torch.float64).round() if masked else None

    def loss() -> torch.Tensor:
        noisy, target = objective.noised(latents, noise, times)
        return image_loss(network(noisy, objective.timestep(times)), target, objective.weights(times), mask)

    loss().backward()
    step = 1e-6
    for parameter in network.parameters():
        assert parameter.grad is not None
        for index in range(0, parameter.numel(), 5):
            with torch.no_grad():
                flat = parameter.view(-1)
                before = flat[index].clone()
                values = []
                for sign in (1, -1):
                    flat[index] = before + sign * step
                    values.append(float(loss()))
                flat[index] = before
            expected = (values[0] - values[1]) / (2 * step)
            assert float(parameter.grad.view(-1)[index]) == pytest.approx(expected, rel=1e-5, abs=1e-8)
