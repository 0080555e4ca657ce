"""Attention in plain torch, in float32 at least: the definition, and the implementation for devices without kernels.

    forward    out = softmax(scale * q k^T) v ,  lse = log sum exp of the rows of scale * q k^T
    backward   dv = p^T g ;  ds = p * (g v^T - rowsum(g * out)) ;  dq = scale * ds k ;  dk = scale * ds^T q
               p = exp(scale * q k^T - lse)

    q (batch, heads, queries, size)   k, v (batch, heads, keys, size)   lse (batch, heads, queries) float32

`causal` means that query i sees keys 0 to i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inweave.ops.common.precision import widened


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out, lse)."""
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype)).to(q.dtype), lse.float()


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv)."""
    scores = _scores(q, k, causal, scale)
    p = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    wide = [tensor.to(scores.dtype) for tensor in (g, q, k, v, out)]
    gw, qw, kw, vw, ow = wide
    ds = p * (gw @ vw.mT - (gw * ow).sum(-1, keepdim=True)) * scale
    return (ds @ kw).to(q.dtype), (ds.mT @ qw).to(k.dtype), (p.mT @ gw).to(v.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = widened(q) @ widened(k).mT
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores * scale
