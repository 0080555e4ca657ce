"""LoKr: a Kronecker product, either factor full or low-rank.

    product   `inweave.ops.delta.lokr`
    w1 = w1 (a, c) | w1_a (a, rank) @ w1_b (rank, c)                      a * b = out
    w2 = w2 (b, d, k...) | w2_a (b, rank) @ w2_b (rank, d * k...)         c * d = in

The weight of a layer with g groups is (out, in/g, k...), and so is the product.

out = a * b and in = c * d are split by `split_factors`, the smaller part first. As in LyCORIS, a factor is low-rank if
that is smaller, rank < max(rows, columns) / 2: w2 always, w1 only with `decompose_both`. A fresh branch is initialized
as in LyCORIS: uniform within 1 / sqrt(fan in), and w2 (or w2_b) zero. With a core w2_a is (rank, b), w2_b (rank, d).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import nn

from inweave.adapter import Factors, Lokr
from inweave.adapter.lokr import split_factors
from inweave.layers.branch import Branch, Geometry, Scaling, Start, kaiming
from inweave.ops.tensors.decode import Reader


class LokrBranch(Branch):
    """Parameters `w1` or `w1_a` and `w1_b`; `w2` or `w2_a` and `w2_b`, with an optional Tucker core `t2`."""

    w1: nn.Parameter | None
    w1_a: nn.Parameter | None
    w1_b: nn.Parameter | None
    w2: nn.Parameter | None
    w2_a: nn.Parameter | None
    w2_b: nn.Parameter | None
    t2: nn.Parameter | None
    factors_type: ClassVar[type[Factors]] = Lokr
    options: ClassVar[frozenset[str]] = frozenset({"factor", "decompose_both", "tucker"})

    def __init__(
        self,
        *,
        w1: torch.Tensor | None = None,
        w1_a: torch.Tensor | None = None,
        w1_b: torch.Tensor | None = None,
        w2: torch.Tensor | None = None,
        w2_a: torch.Tensor | None = None,
        w2_b: torch.Tensor | None = None,
        t2: torch.Tensor | None = None,
        nominal_rank: int | None = None,
        **scaling: Unpack[Scaling],
    ) -> None:
        roles = {"w1": w1, "w1_a": w1_a, "w1_b": w1_b, "w2": w2, "w2_a": w2_a, "w2_b": w2_b, "t2": t2}
        ranked = w2_b if w2_b is not None else w1_b
        own = None if ranked is None else ranked.shape[0]
        super().__init__(roles, own if nominal_rank is None else nominal_rank, **scaling)
        self.nominal_rank = nominal_rank

    @classmethod
    def initial(cls, start: Start, generator: torch.Generator) -> dict[str, torch.Tensor]:
        (channels, *kernel), rank, spec = start.geometry.into, start.rank, start.spec
        (a, b), (c, d) = split_factors(start.geometry.out, spec.factor), split_factors(channels, spec.factor)
        if spec.decompose_both and rank < max(a, c) / 2:
            left = {"w1_a": kaiming(generator, a, rank), "w1_b": kaiming(generator, rank, c)}
        else:
            left = {"w1": kaiming(generator, a, c)}
        if rank < max(b, d) / 2 and spec.tucker and start.geometry.wide:
            core, a_side = kaiming(generator, rank, rank, *kernel), kaiming(generator, rank, b)
            return left | {"t2": core, "w2_a": a_side, "w2_b": torch.zeros(rank, d)}
        if rank < max(b, d) / 2:
            return left | {"w2_a": kaiming(generator, b, rank), "w2_b": torch.zeros(rank, d * math.prod(kernel))}
        return left | {"w2": torch.zeros(b, d, *kernel)}

    @classmethod
    def fresh(cls, start: Start, **scaling: Unpack[Scaling]) -> Self:
        if scaling.get("alpha") is None:  # the same scale; LyCORIS cannot read a file without alpha
            scaling["alpha"] = float(start.rank)
        branch = super().fresh(start, **scaling)
        if branch.rank is None:  # the scale is 1 for any alpha; LyCORIS stores the network's rank to indicate that
            branch.alpha = float(start.usual_rank)
        return branch

    @classmethod
    def from_factors(cls, factors: Factors, geometry: Geometry, read: Reader, **scaling: Unpack[Scaling]) -> Self:
        assert isinstance(factors, Lokr)
        roles: dict[str, Any] = {role: read(tensor) for role, tensor in factors.tensors().items()}
        return cls(**roles, nominal_rank=factors.nominal_rank, **scaling)

    @classmethod
    def obstacle(cls, factors: Factors, geometry: Geometry) -> str | None:
        assert isinstance(factors, Lokr)
        return super().obstacle(factors, geometry) if factors.complete() else "one of its factors is missing"

    def further_fields(self, embedding: bool, groups: int) -> dict[str, Any]:
        return {"nominal_rank": self.nominal_rank}
