"""LoRA and LoCon, with or without a Tucker core.

    delta = scale * reshape(flat(up) @ flat(down), W.shape)
    delta[o,i,h,w] = scale * sum_ab up[o,a] * mid[a,b,h,w] * down[b,i]          with `mid`

    up (out, r, 1...)   down (r, in, k...)   mid (r, r, k...) with down (r, in, 1...)

Grouped form: `down` holds g times the rows that `up` has columns. Output rows and rank rows are then
cut in g pieces that only meet their own: grouped convolutions and q/k/v exports of one block each.
Linear, Conv1x1 and Conv kxk are the same line: dimensionality is never branched on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from inweave.adapter.factors import Factors, magnitude_rows
from inweave.adapter.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora(Factors):
    down: Tensor
    up: Tensor
    mid: Tensor | None = None
    embedding: bool = False  # made for an embedding table, which is stored (rows, features)

    kind: ClassVar[str] = "lora"

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def algorithm(self) -> str:
        if self.mid is not None or any(size > 1 for size in self.down.shape[2:]):
            return "locon" if self.magnitude is None else "dora-locon"
        return "lora" if self.magnitude is None else "dora"

    @property
    def groups(self) -> int:
        """How many diagonal blocks the product has; 0 if the two ranks cannot meet."""
        return block_count(self.up.shape, self.down.shape)

    def shape(self) -> tuple[int, ...]:
        kernel = self.mid.shape[2:] if self.mid else self.down.shape[2:]
        return (self.up.shape[0], *self.down.shape[1:2], *kernel)

    def decisive_tensors(self) -> list[Tensor]:
        return [self.up]

    def rows(self, start: int, length: int) -> Self | None:
        if not self.cuttable():
            return None
        out, groups = self.up.shape[0], self.groups
        down = self.down
        if groups > 1:
            block, rank = out // groups, self.down.shape[0] // groups
            if start % block or length % block:
                return None
            down = down.rows(start // block * rank, length // block * rank)
        return replace(
            self,
            up=self.up.rows(start, length),
            down=down,
            magnitude=magnitude_rows(self.magnitude, out, start, length),
        )


def block_count(up: Sequence[int], down: Sequence[int]) -> int:
    """How many diagonal blocks factors of these shapes make; 0 if the two ranks cannot meet."""
    inner, rank = up[1] if len(up) > 1 else 0, down[0]
    if inner == 0 or rank == 0 or rank % inner or up[0] % (rank // inner):
        return 0
    return rank // inner
