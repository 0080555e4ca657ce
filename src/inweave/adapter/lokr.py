"""LoKr: a Kronecker product, either factor full or low-rank.

    delta = scale * reshape(kron(w1, w2), W.shape)
    w1 = w1 | w1_a @ w1_b
    w2 = w2 | w2_a @ w2_b | Tucker: sum_ab t2[a,b,h,w] * w2_a[a,o] * w2_b[b,c]

The final reshape carries weight: a convolution's kernel may sit in w2's columns, or be spread over
both factors (files of April 2023). The rank is the rows of `w2_b`, else of `w1_b`; with two full
factors there is none and the scale is 1, unless the file or its configuration names a dimension
(`nominal_rank`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from inweave.adapter.factors import Factors, magnitude_rows
from inweave.adapter.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Lokr(Factors):
    w1: Tensor | None = None
    w1_a: Tensor | None = None
    w1_b: Tensor | None = None
    w2: Tensor | None = None
    w2_a: Tensor | None = None
    w2_b: Tensor | None = None
    t2: Tensor | None = None
    nominal_rank: int | None = None

    kind: ClassVar[str] = "lokr"

    @property
    def rank(self) -> int | None:
        if self.nominal_rank is not None:
            return self.nominal_rank
        if self.w2_b is not None:
            return self.w2_b.shape[0]
        return self.w1_b.shape[0] if self.w1_b is not None else None

    def complete(self) -> bool:
        left = self.w1 is not None or (self.w1_a is not None and self.w1_b is not None)
        right = self.w2 is not None or (self.w2_a is not None and self.w2_b is not None)
        return left and right

    def factor_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the two Kronecker factors once rebuilt."""
        if self.w1 is not None:
            left = self.w1.shape
        else:
            assert self.w1_a is not None and self.w1_b is not None
            left = (self.w1_a.shape[0], *self.w1_b.shape[1:])
        if self.w2 is not None:
            return left, self.w2.shape
        assert self.w2_a is not None and self.w2_b is not None
        if self.t2 is not None:
            return left, (self.w2_a.shape[1], self.w2_b.shape[1], *self.t2.shape[2:])
        return left, (self.w2_a.shape[0], *self.w2_b.shape[1:])

    def shape(self) -> tuple[int, ...]:
        left, right = self.factor_shapes()
        return (left[0] * right[0], math.prod(left[1:]) * right[1], *right[2:])

    def decisive_tensors(self) -> list[Tensor]:
        return list(self.tensors().values())

    def rows(self, start: int, length: int) -> Self | None:
        """Output rows are w1's rows times w2's, so a cut must fall between rows of w1."""
        if not self.cuttable():
            return None
        left, right = self.factor_shapes()
        if start % right[0] or length % right[0]:
            return None
        first, count = start // right[0], length // right[0]
        magnitude = magnitude_rows(self.magnitude, left[0] * right[0], start, length)
        if self.w1 is not None:
            return replace(self, w1=self.w1.rows(first, count), magnitude=magnitude)
        assert self.w1_a is not None
        return replace(self, w1_a=self.w1_a.rows(first, count), magnitude=magnitude)
