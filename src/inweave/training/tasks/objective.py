"""What the denoiser is trained to predict, and the loss of a prediction.

    diffusion   x_t = sqrt(a_t) z + sqrt(1 - a_t) e          a_t: the scheduler's own alphas, zero terminal SNR included
                target  epsilon: e      v_prediction: sqrt(a_t) e - sqrt(1 - a_t) z
                min-SNR: each image's loss times min(snr, gamma) / snr (epsilon) or / (snr + 1) (v_prediction)
    flow        x_s = (1 - s) z + s e,  t = 1000 s           target  e - z

    s is sampled   uniform        u
                   logit_normal   sigmoid(mean + std n)
                   sigmoid        sigmoid(std n)
                   shift          f s / (1 + (f - 1) s) of the sigmoid sample; without a setting f is the model's own: the
                                  schedule's, or exp(mu) where the schedule shifts by size (`samplers.DynamicShift`)

Everything random is sampled on the CPU from one generator per example, before the step; the step itself is a function
of static tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from inweave.errors import ConfigError
from inweave.models.model import Model
from inweave.models.samplers import DynamicShift, training_alphas

KINDS = ("epsilon", "v_prediction", "flow")


@dataclass(frozen=True, slots=True)
class Objective:
    """``alphas`` is the diffusion schedule on the device; a flow has none. ``dynamic_shift`` stands in for ``shift``."""

    kind: str
    alphas: torch.Tensor | None
    timesteps: str = "uniform"
    shift: float | None = None
    logit_mean: float = 0.0
    logit_std: float = 1.0
    min_snr_gamma: float | None = None
    noise_offset: float = 0.0
    dynamic_shift: DynamicShift = field(default_factory=DynamicShift)

    @property
    def flow(self) -> bool:
        return self.kind == "flow"

    def draw_times(self, count: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
        """Whole timesteps of the schedule, or noise levels of a flow in 0..1."""
        if not self.flow:
            assert self.alphas is not None
            return torch.randint(len(self.alphas), (count,), generator=generator)
        if self.timesteps == "uniform":
            level = torch.rand(count, generator=generator)
        else:
            mean = self.logit_mean if self.timesteps == "logit_normal" else 0.0
            level = torch.sigmoid(mean + self.logit_std * torch.randn(count, generator=generator))
        if self.timesteps == "shift":
            factor = self.shift if self.shift is not None else math.exp(self.dynamic_shift.mu(tokens))
            level = factor * level / (1 + (factor - 1) * level)
        return level

    def draw_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Noise, with one more number per channel where there is a noise offset."""
        noise = torch.randn(shape, generator=generator)
        if self.noise_offset:
            noise += self.noise_offset * torch.randn(*shape[:2], 1, 1, generator=generator)
        return noise

    def noised(
        self, latents: torch.Tensor, noise: torch.Tensor, times: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(noisy latents, target of the prediction)."""
        if self.flow:
            level = times.reshape(-1, 1, 1, 1).to(latents.dtype)
            return (1 - level) * latents + level * noise, noise - latents
        alpha = self._alphas_at(times).reshape(-1, 1, 1, 1)
        signal, sigma = alpha.sqrt().to(latents.dtype), (1 - alpha).sqrt().to(latents.dtype)
        noisy = signal * latents + sigma * noise
        return noisy, noise if self.kind == "epsilon" else signal * noise - sigma * latents

    def timestep(self, times: torch.Tensor) -> torch.Tensor:
        """The denoiser's timestep, on the scale of the scheduler."""
        return times * 1000.0 if self.flow else times

    def weights(self, times: torch.Tensor) -> torch.Tensor | None:
        """The weight of each image's loss; None: all the same."""
        if self.min_snr_gamma is None or self.flow:
            return None
        alpha = self._alphas_at(times)
        ratio = alpha / (1 - alpha).clamp_min(1e-12)
        if self.kind == "v_prediction":
            return ratio.clamp_max(self.min_snr_gamma) / (ratio + 1)
        return (self.min_snr_gamma / ratio).clamp_max(1.0)  # 1 where the ratio is 0, not 0 / 0

    def _alphas_at(self, times: torch.Tensor) -> torch.Tensor:
        assert self.alphas is not None
        return self.alphas[times]


def mse_loss(
    prediction: torch.Tensor, target: torch.Tensor, weights: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """The mean squared error, in float32 at least; a mask selects where it counts, weights are one per image."""
    wide = torch.promote_types(prediction.dtype, torch.float32)
    error = (prediction.to(wide) - target.to(wide)).square()
    if mask is not None:
        error = error * mask
        each = error.flatten(1).sum(1) / (mask.expand_as(error).flatten(1).sum(1)).clamp_min(1e-6)
    else:
        each = error.flatten(1).mean(1)
    return (each if weights is None else each * weights).mean()


def make_objective(model: Model, objective: str, device: torch.device, **options: Any) -> Objective:
    """The objective a model was trained with, or the one that is set where that is possible."""
    own = "flow" if model.flow else model.prediction
    kind = own if objective == "auto" else objective
    if kind not in KINDS:
        raise ConfigError(f"objective: {kind!r} is unknown; known are {', '.join(KINDS)}")
    if (kind == "flow") != model.flow:
        raise ConfigError(f"objective: {kind} does not fit {model.name}, which was trained with {own}")
    timesteps = options.pop("timesteps", "auto")
    if timesteps == "auto":
        timesteps = "shift" if model.flow and options.get("shift") is not None else model.family.timesteps
    if not model.flow and timesteps != "uniform":
        raise ConfigError(f"timestep_sampling: {timesteps} is for flow matching; {model.name} samples them uniformly")
    schedule = model.scheduler.config
    if not model.flow:
        return Objective(kind, training_alphas(schedule).to(device, torch.float32), timesteps, **options)
    if options.get("shift") is None and not schedule.get("use_dynamic_shifting"):
        options["shift"] = float(schedule.get("shift", 1.0))
    return Objective(kind, None, timesteps, dynamic_shift=DynamicShift.of(schedule), **options)
