"""Layer and RMS normalization in plain torch, in float32 throughout; split into forward and backward like the kernels.

    h = x + added                       the residual stream, rounded to its dtype
    n = (h - mean) * rstd               mean of a row; 0 of `rms`          rstd = 1 / sqrt(average((h - mean)^2) + eps)
    y = n * weight + bias

    g  = dy * weight
    dh = rstd * (g - average(g) - n * average(g * n)) + more              without average(g) of `rms`

``more`` is the gradient of h from its residual connection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inweave.ops.common.precision import widened


def row_norm(
    x: Tensor, added: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (x + added, y, mean, rstd) of x (rows, width); the sum is rounded before it is normalized."""
    total = x if added is None else x + added
    h = widened(total)
    mean = torch.zeros_like(h[:, 0]) if rms else h.mean(1)
    rstd = ((h - mean[:, None]).square().mean(1) + eps).rsqrt()
    y = (h - mean[:, None]) * rstd[:, None]
    y = y if weight is None else y * weight
    return total, (y if bias is None else y + bias).to(x.dtype), mean, rstd


def row_norm_backward(
    dys: Sequence[Tensor], x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, rms: bool, more: Tensor | None
) -> Tensor:
    """Return the gradient of x, the normalized sum; ``dys``: one to three gradients of y, which are added first."""
    n = (widened(x) - mean[:, None]) * rstd[:, None]
    g = torch.stack([widened(dy) for dy in dys]).sum(0)
    g = g if weight is None else g * weight
    dx = g - n * (g * n).mean(1, keepdim=True)
    dx = (dx if rms else dx - g.mean(1, keepdim=True)) * rstd[:, None]
    return (dx if more is None else dx + more).to(x.dtype)
