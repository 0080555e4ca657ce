"""The loss of a prediction: an error per value, its mean per image, and the weighted mean of a batch.

    d = prediction - target, in float32 at least

    mse         d^2
    l1          |d|
    huber       2 c (sqrt(d^2 + c^2) - c)      pseudo-Huber: d^2 near 0, 2 c |d| far away
    smooth_l1   2 (sqrt(d^2 + c^2) - c)        the same divided by c: d^2 / c near 0, 2 |d| far away

c is `huber_c`, and may depend on the timestep (`huber_schedule`; S is the length of the noise schedule, t = 0 .. S - 1,
or t = 1000 s of a flow with S = 1000; sigma^2 = (1 - a_t) / a_t):

    constant      c
    exponential   c^(t / S)                                   1 at the clean end, c at the noisy end
    snr           (1 - c) / (1 + sigma)^2 + c                 likewise, by the signal-to-noise ratio

Khrapov et al., "Improving Diffusion Models's Data-Corruption Resistance using Scheduled Pseudo-Huber Loss",
arXiv 2403.16728.
"""

from __future__ import annotations

import torch


def image_loss(
    prediction: torch.Tensor,
    target: torch.Tensor,
    weights: torch.Tensor | None,
    mask: torch.Tensor | None,
    *,
    average: str = "mask",
    kind: str = "mse",
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mean error; weights and thresholds (c) are one per image.

    A mask selects where the error counts: of its mean over the mask, or, with the ``average`` "image", over the image.
    """
    wide = torch.promote_types(prediction.dtype, torch.float32)
    difference = prediction.to(wide) - target.to(wide)
    if kind == "mse":
        error = difference.square()
    elif kind == "l1":
        error = difference.abs()
    else:
        assert thresholds is not None
        c = thresholds.to(wide).reshape(-1, *[1] * (difference.dim() - 1))
        error = 2 * ((difference.square() + c.square()).sqrt() - c)
        error = error * c if kind == "huber" else error
    if mask is not None:
        error = error * mask
    if mask is not None and average == "mask":
        each = error.flatten(1).sum(1) / (mask.expand_as(error).flatten(1).sum(1)).clamp_min(1e-6)
    else:
        each = error.flatten(1).mean(1)
    return (each if weights is None else each * weights).mean()


def huber_thresholds(
    schedule: str, c: float, times: torch.Tensor, length: int, alphas: torch.Tensor | None
) -> torch.Tensor:
    """Return c of each image, from its timestep on a schedule of ``length``; ``alphas``: at these, for "snr"."""
    if schedule == "constant":
        return torch.full(times.shape, c, dtype=torch.float32, device=times.device)
    if schedule == "exponential":
        return torch.pow(c, times.float() / length)
    assert alphas is not None
    sigma = ((1 - alphas) / alphas).sqrt()  # infinite if the signal is 0, and then c is huber_c
    return (1 - c) / (1 + sigma).square() + c
