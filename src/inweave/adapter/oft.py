"""Orthogonal fine-tuning: the weight is rotated, not added to. Four families that look alike.

`Oft`   rotates OUTPUT rows (kohya, LyCORIS).  blocks (n, b, b), n*b = out
        Q = B - B^T;  c = alpha * out;  if c > 0 and |Q| > c: Q *= c / |Q|   (|Q| over all blocks)
        R = (I + Q) (I - Q)^-1;   strength m: R <- m*R + (1-m)*I
        W'[k,m,...] = sum_n R[k,n,m] * W[k,n,...];   then rows times `rescale`
        `solved` blocks (old `oft_diag`) are R itself.
`Boft`  the same with a butterfly: blocks (M, n, b, b); stage i permutes (c, 2, k) -> (c, k, 2) with
        k = 2^i * b/2, multiplies block j by R[i, j] from the left, undoes the permutation.
`OftIn` rotates INPUTS (PEFT >= 0.16, OneTrainer).  blocks (n, b(b-1)/2): upper triangle, row-major
        R = (I - Q)(I + Q)^-1, or the series I + 2Q + ... + 2Q^(t-2) + Q^(t-1) with `neumann_terms` = t
        (PEFT reads t = 3 as 4, t = 2 as I + 2Q)
        W' = flat(W) @ blockdiag(R)^T;   one block with `share` repeats;   `spread` divides the
        entries by 2*sqrt(b-1) first (OneTrainer's scaled form).
`BoftIn` PEFT BOFT: blocks (M, n, b, b), Q = (B - B^T)/2, R = (I - Q)(I + Q)^-1,
        W' = (butterfly(blockdiag(R)) W^T)^T * s; stage s permutes inputs (c, 2, 2^s, b/2) -> (c, 2^s, 2, b/2)

alpha is a constraint here, never a scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from inweave.adapter.factors import Factors
from inweave.adapter.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Oft(Factors):
    blocks: Tensor
    rescale: Tensor | None = None
    solved: bool = False

    kind: ClassVar[str] = "oft"
    row_local: ClassVar[bool] = False
    additive: ClassVar[bool] = False

    @property
    def scale(self) -> float:
        return 1.0

    def shape(self) -> tuple[int, ...]:
        return (self.blocks.shape[0] * self.blocks.shape[1], -1)

    def rows(self, start: int, length: int) -> Self | None:
        """Blocks may be cut apart where no constraint ties them together."""
        block = self.blocks.shape[1]
        if start % block or length % block or (self.alpha and not self.solved):
            return None
        rescale = self.rescale.rows(start, length) if self.rescale else None
        return replace(self, blocks=self.blocks.rows(start // block, length // block), rescale=rescale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boft(Factors):
    blocks: Tensor
    rescale: Tensor | None = None

    kind: ClassVar[str] = "boft"
    row_local: ClassVar[bool] = False
    additive: ClassVar[bool] = False

    @property
    def scale(self) -> float:
        return 1.0

    def shape(self) -> tuple[int, ...]:
        return (self.blocks.shape[1] * self.blocks.shape[2], -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OftIn(Factors):
    blocks: Tensor
    share: bool = False
    neumann_terms: int | None = None
    spread: Tensor | None = None

    kind: ClassVar[str] = "oft_in"
    additive: ClassVar[bool] = False

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def block_size(self) -> int:
        """b from b(b-1)/2 = stored entries."""
        return (1 + math.isqrt(1 + 8 * self.blocks.shape[1])) // 2

    def shape(self) -> tuple[int, ...]:
        return (-1, -1 if self.share else self.blocks.shape[0] * self.block_size)

    def rows(self, start: int, length: int) -> Self | None:
        return self  # inputs are rotated: every output row gets the same rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class BoftIn(Factors):
    blocks: Tensor
    out_scale: Tensor

    kind: ClassVar[str] = "boft_in"
    additive: ClassVar[bool] = False

    @property
    def scale(self) -> float:
        return 1.0

    def shape(self) -> tuple[int, ...]:
        return (self.out_scale.numel, self.blocks.shape[1] * self.blocks.shape[2])
