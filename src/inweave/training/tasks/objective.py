"""The training objective: the target of the prediction, the sampled noise levels, and their weights.

    diffusion   x_t = sqrt(a_t) z + sqrt(1 - a_t) e          a_t: the scheduler's own alphas, zero terminal SNR included
                target  epsilon: e      v_prediction: sqrt(a_t) e - sqrt(1 - a_t) z
                min-SNR: each image's loss times min(snr, gamma) / snr (epsilon) or / (snr + 1) (v_prediction)
                         Hang et al., "Efficient Diffusion Training via Min-SNR Weighting Strategy", arXiv 2303.09556
                debiased estimation: times 1 / sqrt(snr) (epsilon) or 1 / (snr + 1) (v_prediction), snr at most 1000
                         Yu et al., "Debias the Training of Diffusion Models", arXiv 2310.08442
    flow        x_s = (1 - s) z + s e,  t = 1000 s           target  e - z
                sigma weighting p: each image's loss times s^p; with p = 2 it is that of the image x_s - s * prediction
                timestep weighting: each image's loss times a curve of t = 1 .. 1000 (`timestep_weights.toml`)

    s is sampled   uniform        u
                   logit_normal   sigmoid(mean + std n)
                   sigmoid        sigmoid(std n)
                   shift          the sigmoid sample, always shifted; without a setting f is the model's own: the
                                  schedule's, or exp(mu) if the schedule shifts by size (`samplers.DynamicShift`)
    and shifted    f s / (1 + (f - 1) s), where timestep_shift sets f

    min_timestep, max_timestep     a whole t from min .. max - 1; of a flow, s becomes (min + (max - min) s) / 1000

The loss itself is in `losses`, noise in `noise`. Everything random is sampled on the CPU from one generator per example
before the step, which is a function of static tensors.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import torch

from inweave.errors import ConfigError
from inweave.models.model import Model
from inweave.models.samplers import DynamicShift, training_alphas
from inweave.training.tasks.losses import huber_thresholds, image_loss
from inweave.training.tasks.noise import draw_noise

KINDS = ("epsilon", "v_prediction", "flow")
FLOW_STEPS = 1000  # a flow's timestep is its noise level times this
MAX_DEBIASED_SNR = 1000.0
#: fields of an `Objective` that are settings of a run under the same name
OPTIONS = (
    "logit_mean", "logit_std", "min_snr_gamma", "sigma_weighting", "noise_offset", "noise_offset_random",
    "adaptive_noise_scale", "input_perturbation", "input_perturbation_random", "mask_average",
    "multires_noise_iterations", "multires_noise_discount", "debiased_estimation", "min_timestep", "max_timestep",
    "loss", "huber_c", "huber_schedule",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Objective:
    """``alphas``: the diffusion schedule on the device, None for a flow; ``dynamic_shift``: if ``shift`` is None."""

    kind: str
    alphas: torch.Tensor | None
    timesteps: str = "uniform"
    shift: float | None = None
    logit_mean: float = 0.0
    logit_std: float = 1.0
    min_snr_gamma: float | None = None
    sigma_weighting: float = 0.0
    noise_offset: float = 0.0
    noise_offset_random: bool = False
    adaptive_noise_scale: float = 0.0
    input_perturbation: float = 0.0
    input_perturbation_random: bool = False
    mask_average: str = "mask"
    multires_noise_iterations: int = 0
    multires_noise_discount: float = 0.3
    debiased_estimation: bool = False
    min_timestep: int | None = None
    max_timestep: int | None = None
    loss: str = "mse"
    huber_c: float = 0.1
    huber_schedule: str = "constant"
    dynamic_shift: DynamicShift = field(default_factory=DynamicShift)
    curve: torch.Tensor | None = None  # weights of the timesteps 1 .. 1000 of a flow, on the device

    @property
    def flow(self) -> bool:
        return self.kind == "flow"

    def draw_times(self, count: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
        """Sample whole timesteps of the schedule, or noise levels of a flow in 0..1."""
        if not self.flow:
            first, end = self._timestep_range
            return torch.randint(first, end, (count,), generator=generator)
        if self.timesteps == "uniform":
            level = torch.rand(count, generator=generator)
        else:
            mean = self.logit_mean if self.timesteps == "logit_normal" else 0.0
            level = torch.sigmoid(mean + self.logit_std * torch.randn(count, generator=generator))
        if self.shift is not None or self.timesteps == "shift":
            factor = self.shift if self.shift is not None else math.exp(self.dynamic_shift.mu(tokens))
            level = factor * level / (1 + (factor - 1) * level)
        if self.min_timestep is not None or self.max_timestep is not None:
            first, end = self._timestep_range
            level = (first + (end - first) * level) / FLOW_STEPS
        return level

    @property
    def _timestep_range(self) -> tuple[int, int]:
        """The first sampled timestep, and the one after the last."""
        end = self.schedule_length if self.max_timestep is None else self.max_timestep
        return self.min_timestep or 0, end

    @property
    def schedule_length(self) -> int:
        return FLOW_STEPS if self.alphas is None else len(self.alphas)

    def draw_noise(
        self, shape: tuple[int, ...], generator: torch.Generator, latents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sample noise for ``latents`` of this shape, whose means it depends on with adaptive_noise_scale."""
        adaptive: torch.Tensor | float = 0.0
        if self.adaptive_noise_scale and latents is not None:
            adaptive = self.adaptive_noise_scale * latents.mean((-2, -1), keepdim=True).abs()
        return draw_noise(
            shape, generator, offset=self.noise_offset, random=self.noise_offset_random, adaptive=adaptive,
            iterations=self.multires_noise_iterations,
            discount=self.multires_noise_discount,
        )  # fmt: skip

    def draw_perturbation(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Sample the noise that the model's input has beside that of the target."""
        strength = self.input_perturbation
        if self.input_perturbation_random:
            strength *= float(torch.rand((), generator=generator))
        return strength * torch.randn(shape, generator=generator)

    def noised(
        self, latents: torch.Tensor, noise: torch.Tensor, times: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (noisy latents, target of the prediction)."""
        if self.flow:
            level = times.reshape(-1, 1, 1, 1).to(latents.dtype)
            return (1 - level) * latents + level * noise, noise - latents
        alpha = self._alphas_at(times).reshape(-1, 1, 1, 1)
        signal, sigma = alpha.sqrt().to(latents.dtype), (1 - alpha).sqrt().to(latents.dtype)
        noisy = signal * latents + sigma * noise
        return noisy, noise if self.kind == "epsilon" else signal * noise - sigma * latents

    def timestep(self, times: torch.Tensor) -> torch.Tensor:
        """Return the denoiser's timestep, on the scale of the scheduler."""
        return times * 1000.0 if self.flow else times

    def weights(self, times: torch.Tensor) -> torch.Tensor | None:
        """Return the weight of each image's loss; None: all the same."""
        if self.flow:
            powers = times.float() ** self.sigma_weighting if self.sigma_weighting else None
            if self.curve is None:
                return powers
            curve = self.curve[(times * FLOW_STEPS).ceil().long().clamp(1, FLOW_STEPS) - 1]
            return curve if powers is None else curve * powers
        if self.min_snr_gamma is None and not self.debiased_estimation:
            return None
        alpha = self._alphas_at(times)
        ratio = alpha / (1 - alpha).clamp_min(1e-12)
        velocity = self.kind == "v_prediction"
        weights = None
        if self.min_snr_gamma is not None and velocity:
            weights = ratio.clamp_max(self.min_snr_gamma) / (ratio + 1)
        elif self.min_snr_gamma is not None:
            weights = (self.min_snr_gamma / ratio).clamp_max(1.0)  # 1 if the ratio is 0, not 0 / 0
        if self.debiased_estimation:
            ratio = ratio.clamp_max(MAX_DEBIASED_SNR)
            debiased = 1 / (ratio + 1) if velocity else ratio.rsqrt()
            weights = debiased if weights is None else weights * debiased
        return weights

    def loss_of(
        self,
        prediction: torch.Tensor,
        target: torch.Tensor,
        times: torch.Tensor,
        weights: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the loss of a batch; ``weights``: one per image, with `weights`; a mask selects where it counts."""
        if self.loss in ("mse", "l1"):
            return image_loss(prediction, target, weights, mask, kind=self.loss, average=self.mask_average)
        alphas = self._alphas_at(times) if self.huber_schedule == "snr" else None
        thresholds = huber_thresholds(
            self.huber_schedule, self.huber_c, self.timestep(times), self.schedule_length, alphas
        )
        return image_loss(
            prediction, target, weights, mask, kind=self.loss, thresholds=thresholds, average=self.mask_average
        )

    def _alphas_at(self, times: torch.Tensor) -> torch.Tensor:
        assert self.alphas is not None
        return self.alphas[times]


def make_objective(model: Model, objective: str, device: torch.device, **options: Any) -> Objective:
    """Return the objective a model was trained with, or the configured one; raises ConfigError if it does not fit."""
    own = "flow" if model.flow else model.prediction
    kind = own if objective == "auto" else objective
    if kind not in KINDS:
        raise ConfigError(f"objective: {kind!r} is unknown; known are {', '.join(KINDS)}")
    if (kind == "flow") != model.flow:
        raise ConfigError(f"objective: {kind} does not fit {model.name}, which was trained with {own}")
    timesteps = options.pop("timesteps", "auto")
    if options.pop("weighting", "none") != "none":
        if not model.flow:
            raise ConfigError(f"timestep_weighting: is for flow matching; {model.name} was trained with {own}")
        options["curve"] = timestep_weights().to(device)
    if timesteps == "auto":
        timesteps = "shift" if model.flow and options.get("shift") is not None else model.family.timesteps
    if not model.flow and timesteps != "uniform":
        raise ConfigError(f"timestep_sampling: {timesteps} is for flow matching; {model.name} samples them uniformly")
    schedule = model.scheduler.config
    if not model.flow:
        alphas = training_alphas(schedule).to(device, torch.float32)
        return _ensure_possible(Objective(kind, alphas, timesteps, **options), model)
    if options.get("shift") is None and timesteps == "shift" and not schedule.get("use_dynamic_shifting"):
        options["shift"] = float(schedule.get("shift", 1.0))
    return _ensure_possible(Objective(kind, None, timesteps, dynamic_shift=DynamicShift.of(schedule), **options), model)


def timestep_weights() -> torch.Tensor:
    """Return the weights of the timesteps 1 .. 1000."""
    table = tomllib.loads(files(__package__).joinpath("timestep_weights.toml").read_text("utf-8"))
    return torch.tensor(table["weights"], dtype=torch.float32).flip(0) / 1000


def _ensure_possible(objective: Objective, model: Model) -> Objective:
    """Raise ConfigError if the model's schedule does not support the settings."""
    problems: list[str] = []
    first, end = objective._timestep_range
    if not 0 <= first < end <= objective.schedule_length:
        problems.append(
            f"min_timestep, max_timestep: {first} .. {end} leaves no timestep of {model.name}, which has "
            f"0 .. {objective.schedule_length}; min_timestep must be below max_timestep"
        )
    if objective.flow and objective.loss in ("huber", "smooth_l1") and objective.huber_schedule == "snr":
        problems.append('huber_schedule: "snr" is for models that predict noise; set "constant" or "exponential"')
    if (
        objective.debiased_estimation
        and objective.kind == "epsilon"
        and objective.alphas is not None
        and float(objective.alphas[first:end].min()) <= 0
    ):
        problems.append(
            "debiased_estimation: its weight 1 / sqrt(SNR) is infinite at the last timestep of a schedule with zero "
            f"terminal SNR, which {model.name} has; set max_timestep = {end - 1}, or debiased_estimation = false"
        )
    if problems:
        raise ConfigError(problems)
    return objective
