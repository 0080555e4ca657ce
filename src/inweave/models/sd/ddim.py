"""DDIM without noise, as diffusers' DDIMScheduler computes it, bit for bit; it is the embedded model's sampler.

    x0, noise                                   from the prediction and the latents x at alpha(t)
    x(t - 1) = sqrt(alpha(t - 1)) x0 + sqrt(1 - alpha(t - 1)) noise

alpha is the product of 1 - beta up to t. With zero terminal SNR the square roots of alpha are shifted and scaled so
that the last one is 0 and the first one stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from inspect import signature
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from inweave.models.sd.network import Settings, evaluate_annotations


class DDIMScheduler:
    """The steps of one image; the settings are those of diffusers' class of this name."""

    order = 1
    init_noise_sigma = 1.0

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: np.ndarray | list[float] | None = None,
        clip_sample: bool = True,
        set_alpha_to_one: bool = True,
        steps_offset: int = 0,
        prediction_type: Literal["epsilon", "sample", "v_prediction"] = "epsilon",
        thresholding: bool = False,
        dynamic_thresholding_ratio: float = 0.995,
        clip_sample_range: float = 1.0,
        sample_max_value: float = 1.0,
        timestep_spacing: Literal["leading", "trailing", "linspace"] = "leading",
        rescale_betas_zero_snr: bool = False,
    ) -> None:
        self.config = Settings({name: value for name, value in locals().items() if name != "self"})
        betas = _betas(beta_schedule, beta_start, beta_end, num_train_timesteps, trained_betas)
        if rescale_betas_zero_snr:
            betas = _without_signal_at_the_end(betas)
        self.alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
        self._last_alpha = torch.tensor(1.0) if set_alpha_to_one else self.alphas_cumprod[0]
        self._steps = 0
        self.timesteps = torch.arange(num_train_timesteps - 1, -1, -1)

    @classmethod
    def from_config(cls, settings: Mapping[str, Any], **options: Any) -> Self:
        """Return a scheduler; settings of other schedulers are ignored."""
        known = signature(cls).parameters
        return cls(**{name: value for name, value in {**settings, **options}.items() if name in known})

    def scale_model_input(self, latents: Tensor, time: Any = None) -> Tensor:
        """Return the latents as the denoiser gets them: unchanged."""
        return latents

    def set_timesteps(self, steps: int, device: str | torch.device | None = None) -> None:
        """Choose the times of ``steps`` steps, in falling order."""
        trained, spacing = self.config.num_train_timesteps, self.config.timestep_spacing
        if steps > trained:
            raise ValueError(f"{steps} steps: this model was trained with {trained} timesteps, and DDIM takes no more")
        if spacing == "linspace":
            times = np.linspace(0, trained - 1, steps).round()[::-1]
        elif spacing == "leading":
            times = (np.arange(steps) * (trained // steps))[::-1] + self.config.steps_offset
        elif spacing == "trailing":
            times = np.round(np.arange(trained, 0, -trained / steps)) - 1
        else:
            raise ValueError(f"timestep_spacing: expected leading, trailing or linspace, got {spacing!r}")
        self._steps = steps
        self.timesteps = torch.from_numpy(times.astype(np.int64)).to(device)

    def step(self, prediction: Tensor, time: Any, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Return the latents of the next step, alone in a tuple."""
        following = time - self.config.num_train_timesteps // self._steps
        alpha = self.alphas_cumprod[time]
        next_alpha = self.alphas_cumprod[following] if following >= 0 else self._last_alpha
        signal, spread = alpha**0.5, (1 - alpha) ** 0.5
        if self.config.prediction_type == "epsilon":
            image, noise = (latents - spread * prediction) / signal, prediction
        elif self.config.prediction_type == "sample":
            image, noise = prediction, (latents - signal * prediction) / spread
        elif self.config.prediction_type == "v_prediction":
            image = signal * latents - spread * prediction
            noise = signal * prediction + spread * latents
        else:
            raise ValueError(
                f"prediction_type: expected epsilon, sample or v_prediction, got {self.config.prediction_type!r}"
            )
        return (next_alpha**0.5 * self._limited(image) + (1 - next_alpha) ** 0.5 * noise,)

    def _limited(self, image: Tensor) -> Tensor:
        if self.config.thresholding:
            return _within_quantile(image, self.config.dynamic_thresholding_ratio, self.config.sample_max_value)
        if self.config.clip_sample:
            return image.clamp(-self.config.clip_sample_range, self.config.clip_sample_range)
        return image

    def add_noise(self, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return latents at the noise level of each row's time."""
        alphas = self.alphas_cumprod.to(device=latents.device, dtype=latents.dtype)[times.to(latents.device)]
        signal, spread = (
            part.flatten().view(-1, *[1] * (latents.dim() - 1)) for part in (alphas**0.5, (1 - alphas) ** 0.5)
        )
        return signal * latents + spread * noise


evaluate_annotations(DDIMScheduler)


def _betas(schedule: str, start: float, end: float, count: int, trained: Any) -> Tensor:
    if trained is not None:
        return torch.tensor(trained, dtype=torch.float32)
    if schedule == "linear":
        return torch.linspace(start, end, count, dtype=torch.float32)
    if schedule == "scaled_linear":
        return torch.linspace(start**0.5, end**0.5, count, dtype=torch.float32) ** 2
    if schedule == "squaredcos_cap_v2":
        ends = [_cosine(number / count) for number in range(count + 1)]
        return torch.tensor([min(1 - b / a, 0.999) for a, b in pairwise(ends)], dtype=torch.float32)
    raise ValueError(f"beta_schedule: expected linear, scaled_linear or squaredcos_cap_v2, got {schedule!r}")


def _cosine(time: float) -> float:
    return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2


def _without_signal_at_the_end(betas: Tensor) -> Tensor:
    roots = torch.cumprod(1.0 - betas, dim=0).sqrt()
    first, last = roots[0].clone(), roots[-1].clone()
    roots = (roots - last) * (first / (first - last))
    products = roots**2
    return 1 - torch.cat([products[:1], products[1:] / products[:-1]])


def _within_quantile(image: Tensor, ratio: float, most: float) -> Tensor:
    """Clamp to a quantile of each image's values, at least 1, and divide by it (dynamic thresholding)."""
    flat = image.flatten(1).float()
    bound = torch.quantile(flat.abs(), ratio, dim=1).clamp(min=1, max=most)[:, None]
    return (flat.clamp(-bound, bound) / bound).reshape(image.shape).to(image.dtype)
