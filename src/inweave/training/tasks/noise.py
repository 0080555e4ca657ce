"""Noise of an example: Gaussian, with an offset, or of several resolutions.

    offset     e + c * n                      one n per channel, so that mean brightness is noised too
               c = noise_offset, or at random from 0 to it, + adaptive_noise_scale * |mean of z's channel|, at least 0
               N. Guttenberg, "Diffusion with Offset Noise", 2023
    input      the model's input has e + p * n', with n' Gaussian and p = input_perturbation, or at random from 0 to it
    multires   e' = e + sum_i discount^i up(n_i),   e' / std(e')        i = 0 .. iterations - 1
               n_i: Gaussian of (h / r_i^i, w / r_i^i), r_i uniform in 2 .. 4; up: bilinear to the whole size;
               the sum ends after an n_i whose height or width is 1
               J. Whitaker, "Multi-Resolution Noise for Diffusion Model Training", 2023

The standard deviation is that of one example, so that its noise does not depend on the rest of the batch.
"""

from __future__ import annotations

import torch


def draw_noise(
    shape: tuple[int, ...],
    generator: torch.Generator,
    *,
    offset: float = 0.0,
    random: bool = False,
    adaptive: torch.Tensor | float = 0.0,
    iterations: int = 0,
    discount: float = 0.3,
) -> torch.Tensor:
    """Return noise for one example, or for several of (count, channels, height, width) from the same generator.

    ``random``: the offset is drawn from 0 to ``offset``; ``adaptive``: what is added to it, per channel.
    """
    noise = torch.randn(shape, generator=generator)
    if offset:
        strength = torch.rand((), generator=generator) * offset if random else offset
        each = (adaptive + strength).clamp_min(0) if isinstance(adaptive, torch.Tensor) else strength
        noise += each * torch.randn(*shape[:2], 1, 1, generator=generator)
    return _multires(noise, iterations, discount, generator) if iterations else noise


def _multires(noise: torch.Tensor, iterations: int, discount: float, generator: torch.Generator) -> torch.Tensor:
    *batch, height, width = noise.shape
    for number in range(iterations):
        ratio = (2 + 2 * float(torch.rand((), generator=generator, dtype=torch.float64))) ** number
        size = max(1, int(height / ratio)), max(1, int(width / ratio))
        coarse = torch.randn(*batch, *size, generator=generator)
        noise = noise + discount**number * torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
        if 1 in size:
            break
    return noise / noise.flatten(1).std(1).reshape(-1, *[1] * (noise.dim() - 1))
