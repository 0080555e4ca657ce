"""LoRA for stacked experts: the trainable form of `inweave.adapter.experts`.

A fresh branch is initialized as PEFT's: down uniform within 1 / sqrt(in), up zero.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, Unpack

import torch
from torch import nn

from inweave.adapter import Factors
from inweave.adapter.experts import ExpertLora
from inweave.layers.branch import Branch, Geometry, Scaling, Start, kaiming, seeded
from inweave.ops.delta.experts import factors_of
from inweave.ops.tensors.decode import Reader


class ExpertBranch(Branch):
    """Parameters `down` (experts * rank, in) and `up` (out, rank * experts)."""

    down: nn.Parameter
    up: nn.Parameter
    rank: int
    factors_type: ClassVar[type[Factors]] = ExpertLora

    def __init__(
        self, down: torch.Tensor, up: torch.Tensor, *, experts: int, inputs_first: bool, **scaling: Unpack[Scaling]
    ) -> None:
        super().__init__({"down": down, "up": up}, down.shape[0] // experts, **scaling)
        self.experts, self.inputs_first = experts, inputs_first

    @classmethod
    def fresh(cls, start: Start, **scaling: Unpack[Scaling]) -> Self:
        shape = start.geometry
        one, two = shape.into[-2:] if shape.experts > 1 else (shape.out, shape.into[0])
        out, into = (two, one) if shape.inputs_first else (one, two)
        rows = start.rank * shape.experts
        down = kaiming(seeded(start.spec.seed, start.name), rows, into).to(start.device, start.dtype)
        up = torch.zeros(out, rows, device=start.device, dtype=start.dtype)
        return cls(down, up, experts=shape.experts, inputs_first=shape.inputs_first, **scaling)

    @classmethod
    def initial(cls, start: Start, generator: torch.Generator) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    @classmethod
    def from_factors(cls, factors: Factors, geometry: Geometry, read: Reader, **scaling: Unpack[Scaling]) -> Self:
        assert isinstance(factors, ExpertLora)
        down, up = read(factors.down), read(factors.up)
        first, square = factors.inputs_first, factors.shape() == factors.turned().shape()
        first = geometry.inputs_first if square else first  # shapes tell it otherwise
        return cls(down, up, experts=factors.experts, inputs_first=first, **scaling)

    @classmethod
    def obstacle(cls, factors: Factors, geometry: Geometry) -> str | None:
        expected = (geometry.out, *geometry.into)
        return None if factors.shape() == expected else f"it changes {list(factors.shape())}, not {list(expected)}"

    def further_fields(self, embedding: bool, groups: int) -> dict[str, Any]:
        return {"experts": self.experts, "inputs_first": self.inputs_first}

    def added_to(self, weight: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the weight with the change added, in its dtype and without the change in memory."""
        left, right = factors_of(self.up, self.down, self.experts, self.inputs_first)
        stack = weight if weight.dim() == 3 else weight[None]
        return torch.baddbmm(stack, left.to(weight.dtype), right.to(weight.dtype), alpha=factor).view_as(weight)
