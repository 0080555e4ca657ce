"""Heads of one or two parts of a sequence, normalized, rotated and joined, in plain torch; float32, rounded once.

x         (batch, rows, heads, size), one tensor per part; rows of the parts follow each other in the result
n         = x * rstd * weight             rstd = 1 / sqrt(average(x^2) + eps) of a head; n = x where eps is None
y[2i]     = n[2i]   * cos[2i]   - n[2i+1] * sin[2i]              cos and sin (all rows, size); y = n without them
y[2i+1]   = n[2i+1] * cos[2i+1] + n[2i]   * sin[2i+1]

g[2i]     = dy[2i]   * cos[2i]   + dy[2i+1] * sin[2i+1]
g[2i+1]   = dy[2i+1] * cos[2i+1] - dy[2i]   * sin[2i]
dx        = rstd * (g * weight - h * average(g * weight * h))    h = x * rstd; dx = g where eps is None
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inweave.ops.common.precision import widened


def join_heads(
    parts: Sequence[Tensor], weights: Sequence[Tensor | None], eps: float | None, cos: Tensor | None, sin: Tensor | None
) -> Tensor:
    """Return y (batch, rows of all parts, heads, size), contiguous, of one or two parts with a weight or None each."""
    wide = []
    for part, weight in zip(parts, weights, strict=True):
        n = widened(part)
        if eps is not None:
            n = n * _rstd(n, eps)
            n = n if weight is None else n * weight
        wide.append(n)
    y = torch.cat(wide, 1)
    if cos is not None and sin is not None:
        y = y * cos[:, None] + torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2) * sin[:, None]
    return y.to(parts[0].dtype).contiguous()


def join_heads_backward(
    dy: Tensor,
    parts: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    eps: float | None,
    cos: Tensor | None,
    sin: Tensor | None,
    grads: Sequence[Tensor | None],
) -> None:
    """Write the gradients of the parts to ``grads``, whose heads are side by side; None if it is not requested.

    Without ``eps`` only the shapes of the parts are read.
    """
    g = widened(dy)
    if cos is not None and sin is not None:
        turned = g * sin[:, None]
        g = g * cos[:, None] + torch.stack([turned[..., 1::2], -turned[..., ::2]], -1).flatten(-2)
    pieces = torch.split(g, [part.shape[1] for part in parts], 1)
    for piece, part, weight, grad in zip(pieces, parts, weights, grads, strict=True):
        if grad is None:
            continue
        if eps is None:
            grad.copy_(piece)
            continue
        x = widened(part)
        rstd = _rstd(x, eps)
        h, scaled = x * rstd, piece if weight is None else piece * weight
        grad.copy_(rstd * (scaled - h * (scaled * h).mean(-1, keepdim=True)))


def _rstd(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()
