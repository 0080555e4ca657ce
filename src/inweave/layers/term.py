"""What one adapter adds on one layer: its trained numbers, and the matrix they make.

    delta = scale * product          product: (out, all inputs)

    Pair       flat(up) @ flat(down)                   LoRA, LoCon    `inweave.layers.lora`
    Hadamard   (w1_a @ w1_b) * (w2_a @ w2_b)           LoHa           `inweave.layers.loha`
    Kronecker  kron(w1, w2)                            LoKr           `inweave.layers.lokr`

`out` and `into` are those of the layer's weight seen as (out, into...), whichever way it is stored. The formulas
are those of `inweave.ops.delta`, on live parameters instead of stored bytes: a merge computes the same numbers.

A fresh term's product is zero, so that the layer's output does not change yet. Its numbers depend on the seed and
the module's name alone: not on torch's global generator, the device, or the order of modules.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import ClassVar, TypedDict, Unpack

import torch
from torch import nn

from inweave.adapter import Factors, Tensor, scale


class Shared(TypedDict, total=False):
    """What every term may have besides its factors; see `inweave.adapter.factors`."""

    magnitude: torch.Tensor | None
    alpha: float | None
    rslora: bool
    dropout: float
    stored_alpha: Tensor | None
    stored_scale: Tensor | None


class Term(nn.Module):
    """Parameters by role, and where the adapter has one a `magnitude`; with their scaling."""

    magnitude: nn.Parameter | None
    #: what it is called in a file
    canonical: ClassVar[type[Factors]]

    def __init__(self, roles: Mapping[str, torch.Tensor | None], rank: int | None, **shared: Unpack[Shared]) -> None:
        super().__init__()
        for role, value in (*roles.items(), ("magnitude", shared.get("magnitude"))):
            self.register_parameter(role, None if value is None else nn.Parameter(value))
        self.rank = rank
        self.alpha = shared.get("alpha")
        self.rslora = shared.get("rslora", False)
        self.dropout = shared.get("dropout", 0.0)
        self.stored_alpha = _owned(shared.get("stored_alpha"))
        self.stored_scale = _owned(shared.get("stored_scale"))
        explicit = None if self.stored_scale is None else self.stored_scale.item()
        self.scale = scale(self.alpha, rank, rslora=self.rslora, explicit=explicit)

    def roles(self) -> dict[str, nn.Parameter]:
        """The factors that are there, without the magnitude."""
        return {role: value for role, value in self._parameters.items() if value is not None and role != "magnitude"}

    def product(self) -> torch.Tensor:
        """In float32 (float64 where the factors are), with a gradient: (out, all inputs)."""
        raise NotImplementedError(type(self).__name__)

    def extra_repr(self) -> str:
        shown = ["full" if self.rank is None else f"rank={self.rank}"]
        shown += [] if self.alpha is None else [f"alpha={self.alpha:g}"]
        shown += [name for name, is_set in (("rslora", self.rslora), ("dora", self.magnitude is not None)) if is_set]
        return ", ".join([*shown, *([f"dropout={self.dropout:g}"] if self.dropout else [])])


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """In the dtype products are made in: at least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def low_rank(a: torch.Tensor, b: torch.Tensor, core: torch.Tensor | None) -> torch.Tensor:
    """flat(a) @ flat(b), or sum_pq core[p,q,...] * a[p,o] * b[q,i], flattened after the first axis."""
    a, b = exact(a).flatten(1), exact(b).flatten(1)
    return a @ b if core is None else torch.einsum("pq...,po,qi->oi...", exact(core), a, b).flatten(1)


def seeded(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def kaiming(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Uniform within 1 / sqrt(fan in): kaiming with a = sqrt 5, as torch starts its own layers."""
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _owned(tensor: Tensor | None) -> Tensor | None:
    """Without a view into a mapped file, so that a model with adapters can be copied and sent elsewhere."""
    return None if tensor is None else Tensor(tensor.dtype, tensor.shape, bytes(tensor.data))
