"""LoHa: the elementwise product of two low-rank products. It reaches rank^2 with twice LoRA's parameters.

product   `inweave.ops.delta.loha`         w*_a (out, rank)    w*_b (rank, all inputs)

A fresh branch is initialized as in LyCORIS: w1_b and w2_b normal, w1_a normal with standard deviation 0.1, w2_a zero;
cores normal with 0.1, and then `w*_a` is (rank, out).
"""

from __future__ import annotations

from typing import ClassVar, Self, Unpack

import torch
from torch import nn

from inweave.adapter import Factors, Loha
from inweave.layers.branch import Branch, Scaling, Start


class LohaBranch(Branch):
    """Parameters `w1_a`, `w1_b`, `w2_a`, `w2_b`, and optional Tucker cores `t1` and `t2`."""

    w1_a: nn.Parameter
    w1_b: nn.Parameter
    w2_a: nn.Parameter
    w2_b: nn.Parameter
    t1: nn.Parameter | None
    t2: nn.Parameter | None
    factors_type: ClassVar[type[Factors]] = Loha
    options: ClassVar[frozenset[str]] = frozenset({"tucker"})

    def __init__(
        self,
        w1_a: torch.Tensor,
        w1_b: torch.Tensor,
        w2_a: torch.Tensor,
        w2_b: torch.Tensor,
        *,
        t1: torch.Tensor | None = None,
        t2: torch.Tensor | None = None,
        **scaling: Unpack[Scaling],
    ) -> None:
        roles = {"w1_a": w1_a, "w1_b": w1_b, "w2_a": w2_a, "w2_b": w2_b, "t1": t1, "t2": t2}
        super().__init__(roles, w1_b.shape[0], **scaling)

    @classmethod
    def initial(cls, start: Start, generator: torch.Generator) -> dict[str, torch.Tensor]:
        out, columns, rank = start.geometry.out, start.geometry.columns, start.rank
        channels, *kernel = start.geometry.into

        def normal(deviation: float, *shape: int) -> torch.Tensor:
            return torch.empty(shape).normal_(0, deviation, generator=generator)

        if start.spec.tucker and start.geometry.wide:
            return {
                "t1": normal(0.1, rank, rank, *kernel),
                "w1_b": normal(1.0, rank, channels),
                "w1_a": normal(0.1, rank, out),
                "t2": normal(0.1, rank, rank, *kernel),
                "w2_b": normal(1.0, rank, channels),
                "w2_a": torch.zeros(rank, out),
            }
        return {
            "w1_b": normal(1.0, rank, columns),
            "w1_a": normal(0.1, out, rank),
            "w2_b": normal(1.0, rank, columns),
            "w2_a": torch.zeros(out, rank),
        }

    @classmethod
    def fresh(cls, start: Start, **scaling: Unpack[Scaling]) -> Self:
        if scaling.get("alpha") is None:  # the same scale; LyCORIS cannot read a file without alpha
            scaling["alpha"] = float(start.rank)
        return super().fresh(start, **scaling)
