"""GLoRA's product, which depends on the base weight.

W.a1.a2 + b1 @ b2, or W.a2.a1 + b2 @ b1 in the old layout;   W.a contracts W's axis 1
with `bm` the b part is LoRA's sum with `bm` as `mid`
"""

from __future__ import annotations

from typing import Literal

import torch

from inweave.ops.delta.fit import fitted, flat, misfit
from inweave.ops.delta.low_rank import matmul, tucker


def product(
    a1: torch.Tensor,
    a2: torch.Tensor,
    b1: torch.Tensor,
    b2: torch.Tensor,
    bm: torch.Tensor | None = None,
    *,
    layout: Literal["new", "old"],
    weight: torch.Tensor,
) -> torch.Tensor:
    """Return the product in the shape of ``weight``."""
    a, b = (a1, a2), (b1, b2)
    if layout == "old":
        a, b = a[::-1], b[::-1]
    first, second = flat("glora", a[0]), flat("glora", a[1])
    if weight.dim() < 2 or weight.shape[1] != first.shape[0] or second.shape != first.T.shape:
        raise misfit("glora", f"the weight's inputs against a {tuple(first.shape)}", first.shape[0], weight)
    turned = torch.einsum("oi...,ij,jk->ok...", weight, first, second)
    added = matmul("glora", *b) if bm is None else tucker("glora", bm, flat("glora", b[0]).T, b[1])
    return turned + fitted("glora", added, weight.shape)
