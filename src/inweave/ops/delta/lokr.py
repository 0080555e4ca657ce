"""LoKr's product, for merging and for layers.

    kron(w1, w2);   w1 = w1 | w1_a @ w1_b
                    w2 = w2 | w2_a @ w2_b | sum_ab t2[a,b,...] * w2_a[a,o] * w2_b[b,i]

It is computed on flattened factors: a kernel is innermost, in w2's columns. If both factors contain a part of the
kernel, the reshape to the weight's shape (`fit.fitted`) completes the formula.
"""

from __future__ import annotations

import torch

from inweave.errors import TargetError
from inweave.ops.delta.fit import flat, misfit
from inweave.ops.delta.low_rank import factor


def product(
    *,
    w1: torch.Tensor | None = None,
    w1_a: torch.Tensor | None = None,
    w1_b: torch.Tensor | None = None,
    w2: torch.Tensor | None = None,
    w2_a: torch.Tensor | None = None,
    w2_b: torch.Tensor | None = None,
    t2: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product as (out, in, kernel...), with w2's kernel."""
    left = flat("lokr", _whole("w1", w1, w1_a, w1_b, None))
    right = _whole("w2", w2, w2_a, w2_b, t2)
    if right.dim() < 2:
        raise misfit("lokr", "w2 must be a matrix or a convolution", "2 axes or more", right)
    result = torch.kron(left, flat("lokr", right))
    return result.reshape(left.shape[0] * right.shape[0], left.shape[1] * right.shape[1], *right.shape[2:])


def _whole(
    name: str, full: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, core: torch.Tensor | None
) -> torch.Tensor:
    if full is not None:
        return full
    if a is None or b is None:
        raise TargetError(f"lokr: expected {name}, or {name}_a and {name}_b, got neither")
    made = factor("lokr", a, b, core)
    return made if core is not None else made.reshape(a.shape[0], *b.shape[1:])
