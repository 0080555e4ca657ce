"""What the denoiser is asked for and how its answer is judged.

    diffusion   x_t = sqrt(a_t) z + sqrt(1 - a_t) e          a_t: the scheduler's own alphas, zero terminal SNR included
                target  epsilon: e      v_prediction: sqrt(a_t) e - sqrt(1 - a_t) z
                min-SNR: each picture's loss times min(snr, gamma) / snr (epsilon) or / (snr + 1) (v_prediction)
    flow        x_s = (1 - s) z + s e,  t = 1000 s           target  e - z

    s is drawn   uniform        u
                 logit_normal   sigmoid(mean + std n)
                 sigmoid        sigmoid(std n)
                 shift          f s / (1 + (f - 1) s) of the sigmoid draw; where no f is given it is the model's own: the
                                schedule's, or exp(a line in the number of tokens) where the schedule shifts by size

Everything random is drawn on the CPU from one generator a micro-batch, before the step; the step itself is a function of
static tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from inweave.errors import ConfigError
from inweave.models.teaching import trained_alphas

KINDS = ("epsilon", "v_prediction", "flow")


@dataclass(frozen=True, slots=True)
class Line:
    """mu of a flow whose shift exp(mu) depends on the size: a straight line through two (tokens, mu)."""

    tokens: tuple[int, int] = (256, 4096)
    mu: tuple[float, float] = (0.5, 1.15)

    def at(self, tokens: int) -> float:
        slope = (self.mu[1] - self.mu[0]) / (self.tokens[1] - self.tokens[0])
        return self.mu[0] + slope * (tokens - self.tokens[0])


@dataclass(frozen=True, slots=True)
class Objective:
    """``alphas`` is the diffusion schedule on the device; a flow has none. ``line`` shifts where no ``shift`` is given."""

    kind: str
    alphas: torch.Tensor | None
    timesteps: str = "uniform"
    shift: float | None = None
    logit_mean: float = 0.0
    logit_std: float = 1.0
    min_snr_gamma: float | None = None
    noise_offset: float = 0.0
    line: Line = Line()

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
            factor = self.shift if self.shift is not None else math.exp(self.line.at(tokens))
            level = factor * level / (1 + (factor - 1) * level)
        return level

    def draw_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Noise, with one number a channel added where an offset is asked for."""
        noise = torch.randn(shape, generator=generator)
        if self.noise_offset:
            noise += self.noise_offset * torch.randn(*shape[:2], 1, 1, generator=generator)
        return noise

    def noised(
        self, latents: torch.Tensor, noise: torch.Tensor, times: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the denoiser sees, what it should answer)."""
        if self.flow:
            level = times.reshape(-1, 1, 1, 1).to(latents.dtype)
            return (1 - level) * latents + level * noise, noise - latents
        kept = self._kept(times).reshape(-1, 1, 1, 1)
        signal, spread = kept.sqrt().to(latents.dtype), (1 - kept).sqrt().to(latents.dtype)
        noisy = signal * latents + spread * noise
        return noisy, noise if self.kind == "epsilon" else signal * noise - spread * latents

    def asked_time(self, times: torch.Tensor) -> torch.Tensor:
        """The number the denoiser is told."""
        return times * 1000.0 if self.flow else times

    def weights(self, times: torch.Tensor) -> torch.Tensor | None:
        """How much each picture's loss counts."""
        if self.min_snr_gamma is None or self.flow:
            return None
        kept = self._kept(times)
        ratio = kept / (1 - kept).clamp_min(1e-12)
        if self.kind == "v_prediction":
            return ratio.clamp_max(self.min_snr_gamma) / (ratio + 1)
        return (self.min_snr_gamma / ratio).clamp_max(1.0)  # 1 where the ratio is 0, not 0 / 0

    def _kept(self, times: torch.Tensor) -> torch.Tensor:
        assert self.alphas is not None
        return self.alphas[times]


def judged(
    answer: torch.Tensor, target: torch.Tensor, weights: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """The mean squared error, in float32 at least; a mask counts only where it is open, weights count pictures."""
    wide = torch.promote_types(answer.dtype, torch.float32)
    error = (answer.to(wide) - target.to(wide)).square()
    if mask is not None:
        error = error * mask
        each = error.flatten(1).sum(1) / (mask.expand_as(error).flatten(1).sum(1)).clamp_min(1e-6)
    else:
        each = error.flatten(1).mean(1)
    return (each if weights is None else each * weights).mean()


def make_objective(model: Any, wanted: str, device: torch.device, **options: Any) -> Objective:
    """The objective a model was trained with, or the one asked for where that is possible."""
    own = "flow" if model.flow else model.prediction
    kind = own if wanted == "auto" else wanted
    if kind not in KINDS:
        raise ConfigError(f"objective: {kind!r} is unknown; known are {', '.join(KINDS)}")
    if (kind == "flow") != model.flow:
        raise ConfigError(f"objective: {kind} does not fit {model.name}, which was trained with {own}")
    timesteps = options.pop("timesteps", "auto")
    if timesteps == "auto":
        usual = {"sd3": "logit_normal", "flux": "shift"}.get(model.family, "uniform")
        timesteps = "shift" if model.flow and options.get("shift") is not None else usual
    if not model.flow and timesteps != "uniform":
        raise ConfigError(f"timestep_sampling: {timesteps} is for flow matching; {model.name} draws them uniformly")
    if not model.flow:
        return Objective(kind, trained_alphas(model).to(device, torch.float32), timesteps, **options)
    said = model.scheduler.config
    if options.get("shift") is None and not said.get("use_dynamic_shifting"):
        options["shift"] = float(said.get("shift", 1.0))
    line = Line(
        (said.get("base_image_seq_len", 256), said.get("max_image_seq_len", 4096)),
        (said.get("base_shift", 0.5), said.get("max_shift", 1.15)),
    )
    return Objective(kind, None, timesteps, line=line, **options)
