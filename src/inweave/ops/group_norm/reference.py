"""Group normalization in plain torch, in float32 throughout; split into forward and backward like the kernels.

x is (batch, positions, channels), the memory of a channels-last image: statistics over positions and channels of a
group.

    h = x + shift                       shift: one number per channel and example, or none
    n = (h - mean) * rstd               rstd = 1 / sqrt(variance + eps)
    z = n * weight + bias
    y = z, or silu(z) = z * sigmoid(z)

    g  = dy * weight, or dy * silu'(z) * weight         silu'(z) = s (1 + z (1 - s)),  s = sigmoid(z)
    dx = rstd * (g - average(g) - n * average(g * n)) + more

``more`` is the gradient of x from its residual connection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inweave.ops.common.precision import widened


def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, rstd) of x (batch, positions, channels); mean and rstd are float32, (batch, groups)."""
    h = _grouped(_shifted(x, shift), groups)
    variance, mean = torch.var_mean(h, dim=(1, 3), correction=0)
    rstd = (variance + eps).rsqrt()
    z = _affine(_normal(h, mean, rstd).reshape(x.shape), weight, bias)
    return (z * z.sigmoid() if silu else z).to(x.dtype), mean, rstd


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    shift: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    silu: bool,
    more: Tensor | None,
) -> Tensor:
    """Return the gradient of x."""
    groups = mean.shape[1]
    n = _normal(_grouped(_shifted(x, shift), groups), mean, rstd)
    g = widened(dy)
    if silu:
        z = _affine(n.reshape(x.shape), weight, bias)
        s = z.sigmoid()
        g = g * (s * (1 + z * (1 - s)))
    g = _grouped(g * widened(weight), groups)
    dx = g - g.mean(dim=(1, 3), keepdim=True) - n * (g * n).mean(dim=(1, 3), keepdim=True)
    dx = (dx * rstd[:, None, :, None]).reshape(x.shape)
    return (dx if more is None else dx + more).to(x.dtype)


def _shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    return widened(x) if shift is None else widened(x) + shift[:, None]


def _grouped(h: Tensor, groups: int) -> Tensor:
    return h.reshape(*h.shape[:2], groups, -1)


def _normal(h: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (h - mean[:, None, :, None]) * rstd[:, None, :, None]


def _affine(n: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return n * weight + bias
