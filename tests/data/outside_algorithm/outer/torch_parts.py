"""The formula and the trainable branch of the algorithm."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch

from inweave.adapter import Factors
from inweave.layers.branch import Branch, Scaling, Start
from outer import Outer


def product(column: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Return column @ row."""
    return column @ row


class OuterBranch(Branch):
    """Parameters `column` and `row`."""

    factors_type: ClassVar[type[Factors]] = Outer

    def __init__(self, column: torch.Tensor, row: torch.Tensor, **scaling: Unpack[Scaling]) -> None:
        super().__init__({"column": column, "row": row}, 1, **scaling)

    @classmethod
    def initial(cls, start: Start, generator: torch.Generator) -> dict[str, torch.Tensor]:
        geometry = start.geometry
        return {"column": torch.zeros(geometry.out, 1), "row": torch.rand(1, geometry.columns, generator=generator)}
