"""The trained numbers of one adapter on one layer.

    delta = scale * flat(up) @ flat(down)      down (rank, into...)    up (out, rank, 1...)
    with `mid` (Tucker): down is (rank, in, 1...), and mid @ down takes its place
    with fewer columns in `up` than rows in `down`: that many diagonal blocks (see `weft.adapter.lora`)

`out` and `into` are those of the layer's weight seen as (out, into...), whichever way it is stored.

A fresh pair starts as the field starts it, so that the layer's output does not change yet: down uniform within
1 / sqrt(fan in) (kaiming with a = sqrt 5), up zero; on an embedding down zero, up normal. The numbers depend on
the seed and the module's name alone: not on torch's global generator, the device, or the order of modules.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from weft.adapter import Tensor, scale


class Pair(nn.Module):
    """Parameters `down`, `up`, and where the adapter has them `mid` and `magnitude`; with their scaling."""

    down: nn.Parameter
    up: nn.Parameter
    mid: nn.Parameter | None
    magnitude: nn.Parameter | None

    def __init__(
        self,
        down: torch.Tensor,
        up: torch.Tensor,
        *,
        mid: torch.Tensor | None = None,
        magnitude: torch.Tensor | None = None,
        alpha: float | None = None,
        stabilised: bool = False,
        dropout: float = 0.0,
        stored_alpha: Tensor | None = None,
        stored_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(up)
        self.mid = None if mid is None else nn.Parameter(mid)
        self.magnitude = None if magnitude is None else nn.Parameter(magnitude)
        self.alpha = alpha
        self.stabilised = stabilised
        self.dropout = dropout
        self.stored_alpha = _owned(stored_alpha)
        self.stored_scale = _owned(stored_scale)
        explicit = stored_scale.item() if stored_scale is not None else None
        self.scale = scale(alpha, self.rank, stabilised=stabilised, explicit=explicit)

    @property
    def rank(self) -> int:
        return self.down.shape[0]

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
        """flat(up) @ flat(down) in diagonal blocks, in float32 (float64 where the factors are): (out, all inputs)."""
        dtype = torch.promote_types(self.down.dtype, torch.float32)
        down, up = self.effective_down().flatten(1).to(dtype), self.up.flatten(1).to(dtype)
        up = up.reshape(self.blocks, -1, up.shape[1])
        return torch.bmm(up, down.reshape(self.blocks, up.shape[2], -1)).flatten(0, 1)

    def extra_repr(self) -> str:
        alpha = "" if self.alpha is None else f", alpha={self.alpha:g}"
        marks = [name for name, is_set in (("rslora", self.stabilised), ("dora", self.magnitude is not None)) if is_set]
        dropout = [f"dropout={self.dropout:g}"] if self.dropout else []
        return ", ".join([f"rank={self.rank}{alpha}", *marks, *dropout])


def fresh_factors(
    out: int, into: tuple[int, ...], rank: int, *, seed: int, name: str, embedding: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(down, up) of a new adapter on the module ``name``, in float32 on the CPU."""
    generator = seeded(seed, name)
    down, up = torch.zeros(rank, *into), torch.zeros(out, rank, *[1] * (len(into) - 1))
    if embedding:
        up.normal_(generator=generator)
    else:
        bound = 1 / math.sqrt(math.prod(into))
        down.uniform_(-bound, bound, generator=generator)
    return down, up


def seeded(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _owned(tensor: Tensor | None) -> Tensor | None:
    """Without a view into a mapped file, so that a model with adapters can be copied and sent elsewhere."""
    return None if tensor is None else Tensor(tensor.dtype, tensor.shape, bytes(tensor.data))
