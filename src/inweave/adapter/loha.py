"""LoHa: the Hadamard product of two low-rank products.

    delta = scale * (w1_a @ w1_b) * (w2_a @ w2_b)                      w*_a (out, r)   w*_b (r, in*k*k)
    factor_i[o,c,h,w] = sum_ab t_i[a,b,h,w] * wi_a[a,o] * wi_b[b,c]    w*_a (r, out)   w*_b (r, in)

The second line is the Tucker form, whose `w*_a` is stored transposed. Some trainers store the four
of the first form as 4-D convolution weights; they are flattened from axis 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from inweave.adapter.factors import Factors, flat_shape, magnitude_rows
from inweave.adapter.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Loha(Factors):
    w1_a: Tensor
    w1_b: Tensor
    w2_a: Tensor
    w2_b: Tensor
    t1: Tensor | None = None
    t2: Tensor | None = None

    kind: ClassVar[str] = "loha"

    @property
    def rank(self) -> int:
        return self.w1_b.shape[0]

    def shape(self) -> tuple[int, ...]:
        if self.t1 is not None:
            return (self.w1_a.shape[1], self.w1_b.shape[1], *self.t1.shape[2:])
        return (self.w1_a.shape[0], flat_shape(self.w1_b)[1])

    def decisive_tensors(self) -> list[Tensor]:
        return list(self.tensors().values())

    def rows(self, start: int, length: int) -> Self | None:
        if not self.cuttable():
            return None
        if self.t1 is not None:
            return None
        return replace(
            self,
            w1_a=self.w1_a.rows(start, length),
            w2_a=self.w2_a.rows(start, length),
            magnitude=magnitude_rows(self.magnitude, self.w1_a.shape[0], start, length),
        )
