"""LoHa's product, for merging and for layers, with a backward pass that saves no large tensor.

(w1_a @ w1_b) * (w2_a @ w2_b)
each half [o,i,...] = sum_ab w_a[a,o] * t[a,b,...] * w_b[b,i]             with `t1` and `t2`

gradient, G that of the product:   L = G * (w2_a @ w2_b)     w1_a: L @ w1_b^T    w1_b: w1_a^T @ L
                                   R = G * (w1_a @ w1_b)     w2_a: R @ w2_b^T    w2_b: w2_a^T @ R
"""

from __future__ import annotations

from typing import Any, cast

import torch

from inweave.ops.delta.fit import misfit
from inweave.ops.delta.low_rank import factor, matrices


def product(
    w1_a: torch.Tensor,
    w1_b: torch.Tensor,
    w2_a: torch.Tensor,
    w2_b: torch.Tensor,
    t1: torch.Tensor | None = None,
    t2: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product as (out, all inputs), or (out, in, kernel...) with cores."""
    if t1 is not None or t2 is not None:
        left, right = factor("loha", w1_a, w1_b, t1), factor("loha", w2_a, w2_b, t2)
        if left.shape != right.shape:
            raise misfit("loha", "the two halves differ", left, right)
        return left * right
    first, second = matrices("loha", w1_a, w1_b), matrices("loha", w2_a, w2_b)
    shapes = [(a.shape[0], b.shape[1]) for a, b in (first, second)]
    if shapes[0] != shapes[1]:  # a half of one row or column would silently be broadcast
        raise misfit("loha", "the two halves differ", *shapes)
    return cast("torch.Tensor", _Product.apply(*first, *second))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """Recomputes both halves in the backward pass: each is as large as the layer's weight, and saved for every layer
    they would dominate activation memory.
    """

    @staticmethod
    def forward(w1_a: torch.Tensor, w1_b: torch.Tensor, w2_a: torch.Tensor, w2_b: torch.Tensor) -> torch.Tensor:
        return (w1_a @ w1_b) * (w2_a @ w2_b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w1_a, w1_b, w2_a, w2_b = ctx.saved_tensors
        left = grads[0] * (w2_a @ w2_b)
        right = grads[0] * (w1_a @ w1_b)
        return left @ w1_b.T, w1_a.T @ left, right @ w2_b.T, w2_a.T @ right
