"""LoRA: two factors, or three with a Tucker core.

    product = flat(up) @ flat(down)            down (rank, into...)    up (out, rank, 1...)
    with `mid` (Tucker): down is (rank, in, 1...), and mid @ down takes its place
    with fewer columns in `up` than rows in `down`: that many diagonal blocks (see `inweave.adapter.lora`)

A fresh pair starts as the field starts it: down uniform within 1 / sqrt(fan in), up zero; on an embedding down
zero, up normal.
"""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import nn

from inweave.adapter import Factors, Lora
from inweave.layers.term import Shared, Term, kaiming, seeded


class Pair(Term):
    """Parameters `down`, `up`, and where the adapter has one `mid`."""

    down: nn.Parameter
    up: nn.Parameter
    mid: nn.Parameter | None
    rank: int
    canonical: ClassVar[type[Factors]] = Lora

    def __init__(
        self, down: torch.Tensor, up: torch.Tensor, *, mid: torch.Tensor | None = None, **shared: Unpack[Shared]
    ) -> None:
        super().__init__({"down": down, "up": up, "mid": mid}, down.shape[0], **shared)

    @property
    def blocks(self) -> int:
        """How many diagonal blocks the product has."""
        return self.rank // self.up.shape[1] if self.mid is None else 1

    def effective_down(self) -> torch.Tensor:
        """`down` with the layer's own kernel: mid @ down where there is a Tucker core."""
        if self.mid is None:
            return self.down
        return torch.einsum("ab...,bi->ai...", self.mid, self.down.flatten(1))

    def product(self) -> torch.Tensor:
        dtype = torch.promote_types(self.down.dtype, torch.float32)
        down, up = self.effective_down().flatten(1).to(dtype), self.up.flatten(1).to(dtype)
        up = up.reshape(self.blocks, -1, up.shape[1])
        return torch.bmm(up, down.reshape(self.blocks, up.shape[2], -1)).flatten(0, 1)


def fresh_pair(
    out: int, into: tuple[int, ...], rank: int, *, seed: int, name: str, embedding: bool
) -> dict[str, torch.Tensor]:
    """The factors of a new adapter on the module ``name``, in float32 on the CPU."""
    generator, flat = seeded(seed, name), [1] * (len(into) - 1)
    if embedding:
        return {"down": torch.zeros(rank, *into), "up": torch.empty(out, rank, *flat).normal_(generator=generator)}
    return {"down": kaiming(generator, rank, *into), "up": torch.zeros(out, rank, *flat)}
