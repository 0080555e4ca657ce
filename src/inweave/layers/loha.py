"""LoHa: two low-rank products, multiplied number by number. Its rank reaches rank^2 with twice LoRA's numbers.

    product = (w1_a @ w1_b) * (w2_a @ w2_b)         w*_a (out, rank)    w*_b (rank, all inputs)
    with cores t1, t2 (Tucker) each half is sum_pq t[p,q,...] * w_a[p,o] * w_b[q,i]

    gradient, G that of the product:   L = G * (w2_a @ w2_b)     w1_a: L @ w1_b^T    w1_b: w1_a^T @ L
                                       R = G * (w1_a @ w1_b)     w2_a: R @ w2_b^T    w2_b: w2_a^T @ R

A fresh term starts as LyCORIS starts it: w1_b and w2_b normal, w1_a normal with spread 0.1, w2_a zero.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import nn

from inweave.adapter import Factors, Loha
from inweave.layers.term import Shared, Term, exact, low_rank, seeded


class Hadamard(Term):
    """Parameters `w1_a`, `w1_b`, `w2_a`, `w2_b`, and where the adapter has them `t1` and `t2`."""

    w1_a: nn.Parameter
    w1_b: nn.Parameter
    w2_a: nn.Parameter
    w2_b: nn.Parameter
    t1: nn.Parameter | None
    t2: nn.Parameter | None
    canonical: ClassVar[type[Factors]] = Loha

    def __init__(
        self,
        w1_a: torch.Tensor,
        w1_b: torch.Tensor,
        w2_a: torch.Tensor,
        w2_b: torch.Tensor,
        *,
        t1: torch.Tensor | None = None,
        t2: torch.Tensor | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        roles = {"w1_a": w1_a, "w1_b": w1_b, "w2_a": w2_a, "w2_b": w2_b, "t1": t1, "t2": t2}
        super().__init__(roles, w1_b.shape[0], **shared)

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        return low_rank(self.w1_a, self.w1_b, self.t1), low_rank(self.w2_a, self.w2_b, self.t2)

    def product(self) -> torch.Tensor:
        if self.t1 is None and self.t2 is None:
            flat = [exact(factor).flatten(1) for factor in (self.w1_a, self.w1_b, self.w2_a, self.w2_b)]
            return cast("torch.Tensor", _Product.apply(*flat))  # type: ignore[no-untyped-call]
        left, right = self.halves()
        return left * right


class _Product(torch.autograd.Function):
    """The formula above. The halves are made again for the gradient: each is as large as the layer's weight, and
    kept from every layer of a model until the backward pass they would be the largest part of its memory."""

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


def fresh_hadamard(out: int, into: tuple[int, ...], rank: int, *, seed: int, name: str) -> dict[str, torch.Tensor]:
    """The factors of a new adapter on the module ``name``, in float32 on the CPU."""
    generator, columns = seeded(seed, name), math.prod(into)

    def normal(spread: float, *shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0, spread, generator=generator)

    return {
        "w1_b": normal(1.0, rank, columns),
        "w1_a": normal(0.1, out, rank),
        "w2_b": normal(1.0, rank, columns),
        "w2_a": torch.zeros(out, rank),
    }
