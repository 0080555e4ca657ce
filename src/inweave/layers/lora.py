"""LoRA: two factors, or three with a Tucker core.

    product   `inweave.ops.delta.lora`         down (rank, into...)    up (out, rank, 1...)
    output    up(down(x)), in two steps, without computing the product
              in training up(module_dropout(rank_dropout(hidden_dropout(down(x)))))      `inweave.layers.dropout`
    with `mid` (Tucker): down is (rank, in, 1...), and mid @ down takes its place
    with fewer columns in `up` than rows in `down`: diagonal blocks, rows / columns of them (`inweave.adapter.lora`)

A fresh branch has the usual initialization: down and mid uniform within 1 / sqrt(fan in), up zero; on an embedding down
zero, up normal.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import nn

from inweave.adapter import Factors, Lora
from inweave.layers.branch import Branch, Geometry, Scaling, Start, changes_another_shape, exact, kaiming
from inweave.layers.dropout import HIDDEN, MODULE, RANKS, dropout, module_dropout, rank_dropout
from inweave.ops.kinds import LayerKind
from inweave.ops.tensors.decode import Reader


class LoraBranch(Branch):
    """Parameters `down`, `up`, and an optional `mid` (Tucker core)."""

    down: nn.Parameter
    up: nn.Parameter
    mid: nn.Parameter | None
    rank: int
    factors_type: ClassVar[type[Factors]] = Lora
    takes_embeddings: ClassVar[bool] = True
    is_pair: ClassVar[bool] = True
    variants: ClassVar[tuple[str, ...]] = ("lora", "locon", "dora")
    options: ClassVar[frozenset[str]] = frozenset({"tucker"})

    def __init__(
        self, down: torch.Tensor, up: torch.Tensor, *, mid: torch.Tensor | None = None, **scaling: Unpack[Scaling]
    ) -> None:
        super().__init__({"down": down, "up": up, "mid": mid}, down.shape[0], **scaling)

    @classmethod
    def initial(cls, start: Start, generator: torch.Generator) -> dict[str, torch.Tensor]:
        geometry, rank = start.geometry, start.rank
        up = torch.zeros(geometry.out, rank, *[1] * (len(geometry.into) - 1))
        if geometry.embedding:
            return {"down": torch.zeros(rank, *geometry.into), "up": up.normal_(generator=generator)}
        if start.spec.tucker and geometry.wide and geometry.groups == 1:
            inputs, *kernel = geometry.into
            down = kaiming(generator, rank, inputs, *[1] * len(kernel))
            return {"down": down, "up": up, "mid": kaiming(generator, rank, rank, *kernel)}
        return {"down": kaiming(generator, rank, *geometry.into), "up": up}

    @classmethod
    def from_factors(cls, factors: Factors, geometry: Geometry, read: Reader, **scaling: Unpack[Scaling]) -> Self:
        """Return a branch with the layer's axes: a file may have a matrix for a convolution, and vice versa."""
        assert isinstance(factors, Lora)
        into, ones = geometry.into, [1] * (len(geometry.into) - 1)
        rank, columns = factors.down.shape[0], factors.up.shape[1]
        return cls(
            read(factors.down).reshape(rank, *((into[0], *ones) if factors.mid is not None else into)),
            read(factors.up).reshape(geometry.out, columns, *ones),
            mid=None if factors.mid is None else read(factors.mid).reshape(columns, rank, *into[1:]),
            **scaling,
        )

    @classmethod
    def obstacle(cls, factors: Factors, geometry: Geometry) -> str | None:
        assert isinstance(factors, Lora)
        if reason := changes_another_shape((factors.up.shape[0], math.prod(factors.shape()[1:])), geometry):
            return reason
        if factors.mid is not None:
            ranks = (factors.up.shape[1], factors.down.shape[0])
            return None if factors.mid.shape[:2] == ranks else f"its core {factors.mid.shape} does not fit {ranks}"
        if factors.groups not in ((1, geometry.groups) if geometry.groups > 1 else range(1, factors.rank + 1)):
            return f"its {factors.groups} blocks do not fit the layer's {geometry.groups} groups"
        return None

    @property
    def blocks(self) -> int:
        """The number of diagonal blocks in the product."""
        return self.rank // self.up.shape[1] if self.mid is None else 1

    def variant(self) -> str:
        if self.magnitude is not None:
            return "dora"
        kernel = self.down.shape[2:] if self.mid is None else self.mid.shape[2:]
        return "locon" if any(size > 1 for size in kernel) else "lora"

    def further_fields(self, embedding: bool, groups: int) -> dict[str, Any]:
        return {"embedding": embedding, "layer_groups": groups}

    @property
    def drops_between(self) -> bool:
        whole = self.module_dropout and self.magnitude is None
        return bool(self.hidden_dropout or self.rank_dropout or whole)

    def effective_down(self) -> torch.Tensor:
        """Return `down` with the layer's kernel: mid @ down if there is a Tucker core."""
        if self.mid is None:
            return self.down
        return torch.einsum("ab...,bi->ai...", self.mid, self.down.flatten(1))

    def product_norm(self) -> torch.Tensor:
        """Return the norm by |up down|^2 = sum of (up^T up) * (down down^T), without computing the product."""
        if self.mid is not None or self.blocks > 1:
            return super().product_norm()
        up, down = exact(self.up).flatten(1), exact(self.down).flatten(1)
        return ((up.T @ up) * (down @ down.T)).sum().clamp_min(0).sqrt()

    def output(
        self, kind: LayerKind, module: nn.Module, x: torch.Tensor, dtype: torch.dtype, training: bool = False
    ) -> torch.Tensor:
        down = self.effective_down()
        if training and self.drops_between:
            return kind.apply_low_rank(module, x, down, self.up, self.blocks, dtype, self._drop_hidden)
        return kind.apply_low_rank(module, x, down, self.up, self.blocks, dtype)

    def _drop_hidden(self, hidden: torch.Tensor, axis: int) -> torch.Tensor:
        hidden = dropout(hidden, self.hidden_dropout, True, self.row_seeds, self.layer_number + HIDDEN)
        if self.rank_dropout:
            number, rank = self.layer_number + RANKS, self.up.shape[1] * self.blocks
            hidden = rank_dropout(hidden, self.rank_dropout, axis, rank, self.row_seeds, number)
        if self.module_dropout and self.magnitude is None:
            number = self.layer_number + MODULE
            hidden = module_dropout(hidden, self.module_dropout, axis, self.row_seeds, number)
        return hidden
