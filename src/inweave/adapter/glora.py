"""GLoRA: a change that depends on the weight it changes.

    new layout:  a1 (in, r)  a2 (r, in)  b1 (out, r)  b2 (r, in*k*k)    delta = scale * (W.a1.a2 + b1.b2)
    old layout:  a1 (r, in)  a2 (in, r)  b1 (r, in)   b2 (out, r)       delta = scale * (W.a2.a1 + b2.b1)

`W.a` contracts the input-channel axis of W. With `bm` the b-part is a Tucker product as in LoCon.
All four shapes are compared to tell the layouts apart. On a square weight both can fit, and the reading with
the smaller rank is used; at rank = width the two cannot be told apart, so the new one is used, with a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from inweave.adapter.factors import Factors
from inweave.adapter.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Glora(Factors):
    a1: Tensor
    a2: Tensor
    b1: Tensor
    b2: Tensor
    bm: Tensor | None = None

    kind: ClassVar[str] = "glora"
    additive: ClassVar[bool] = False

    @property
    def layouts(self) -> tuple[Literal["new", "old"], ...]:
        """Every layout the four shapes allow, the likelier (smaller rank) first; that one is used."""
        possible: list[tuple[int, Literal["new", "old"]]] = []
        orders: tuple[tuple[Literal["new", "old"], tuple[Tensor, Tensor, Tensor, Tensor]], ...] = (
            ("new", (self.a1, self.a2, self.b1, self.b2)),
            ("old", (self.a2, self.a1, self.b2, self.b1)),
        )
        for name, (left, right, out, into) in orders:
            rank = left.shape[1]
            if left.shape[0] == right.shape[1] and right.shape[0] == rank == out.shape[1] == into.shape[0]:
                possible.append((rank, name))
        return tuple(name for _, name in sorted(possible, key=lambda row: row[0]))

    @property
    def layout(self) -> Literal["new", "old"]:
        return (*self.layouts, "new")[0]

    @property
    def rank(self) -> int:
        return self.a1.shape[1] if self.layout == "new" else self.a1.shape[0]

    def shape(self) -> tuple[int, ...]:
        out, into = (self.b1, self.b2) if self.layout == "new" else (self.b2, self.b1)
        kernel = self.bm.shape[2:] if self.bm else into.shape[2:]
        return (out.shape[0], into.shape[1], *kernel)
