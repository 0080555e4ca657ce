"""LoKr: a Kronecker product, either factor full or low-rank.

    product = kron(flat(w1), flat(w2))          flat: (first axis, all others)
    w1 = w1 (a, c) | w1_a (a, rank) @ w1_b (rank, c)                      a * b = out
    w2 = w2 (b, d, k...) | w2_a (b, rank) @ w2_b (rank, d * k...)         c * d = in
       | Tucker: sum_pq t2[p,q,...] * w2_a[p,o] * w2_b[q,i]

Flattening is free: in kron(w1, w2) on a convolution the kernel lies innermost, in w2's columns. The weight of a
layer with g groups is (out, in/g, k...), and so is the product.

out = a * b and in = c * d are cut by `factored`, the smaller part first. As LyCORIS does it, a factor is low-rank
where that is smaller, rank < max(rows, columns) / 2: w2 always, w1 only with ``both``. A fresh term starts as there:
uniform within 1 / sqrt(fan in), and w2 (or w2_b) zero.
"""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import nn

from inweave.adapter import Factors, Lokr
from inweave.layers.term import Shared, Term, exact, kaiming, low_rank, seeded


class Kronecker(Term):
    """Parameters `w1` or `w1_a` and `w1_b`; `w2` or `w2_a` and `w2_b`, with a core `t2` where there is one."""

    w1: nn.Parameter | None
    w1_a: nn.Parameter | None
    w1_b: nn.Parameter | None
    w2: nn.Parameter | None
    w2_a: nn.Parameter | None
    w2_b: nn.Parameter | None
    t2: nn.Parameter | None
    canonical: ClassVar[type[Factors]] = Lokr

    def __init__(
        self,
        *,
        w1: torch.Tensor | None = None,
        w1_a: torch.Tensor | None = None,
        w1_b: torch.Tensor | None = None,
        w2: torch.Tensor | None = None,
        w2_a: torch.Tensor | None = None,
        w2_b: torch.Tensor | None = None,
        t2: torch.Tensor | None = None,
        nominal_rank: int | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        roles = {"w1": w1, "w1_a": w1_a, "w1_b": w1_b, "w2": w2, "w2_a": w2_a, "w2_b": w2_b, "t2": t2}
        ranked = w2_b if w2_b is not None else w1_b
        own = None if ranked is None else ranked.shape[0]
        super().__init__(roles, own if nominal_rank is None else nominal_rank, **shared)
        self.nominal_rank = nominal_rank

    def product(self) -> torch.Tensor:
        left = _whole(self.w1, self.w1_a, self.w1_b, None)
        right = _whole(self.w2, self.w2_a, self.w2_b, self.t2)
        return torch.kron(left, right)


def _whole(
    full: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, core: torch.Tensor | None
) -> torch.Tensor:
    if full is not None:
        return exact(full).flatten(1)
    assert a is not None and b is not None
    return low_rank(a, b, core)


def factored(size: int, factor: int = -1) -> tuple[int, int]:
    """(small, large) with small * large = ``size``.

    ``factor`` itself where it divides the size; else the largest divisor up to it that is not above the square
    root, -1 for no limit: 250 -> (10, 25), with 5 (5, 50), with 4 (2, 125); a prime 127 -> (1, 127).
    """
    if factor > 0 and size % factor == 0:
        small = factor
    else:
        most = math.isqrt(size) if factor < 0 else min(math.isqrt(size), factor)
        small = next(part for part in range(max(most, 1), 0, -1) if size % part == 0)
    return min(small, size // small), max(small, size // small)


def fresh_kronecker(
    out: int, into: tuple[int, ...], rank: int, *, factor: int, both: bool, seed: int, name: str
) -> dict[str, torch.Tensor]:
    """The factors of a new adapter on the module ``name``, in float32 on the CPU."""
    generator, kernel = seeded(seed, name), into[1:]
    (a, b), (c, d) = factored(out, factor), factored(into[0], factor)
    if both and rank < max(a, c) / 2:
        made = {"w1_a": kaiming(generator, a, rank), "w1_b": kaiming(generator, rank, c)}
    else:
        made = {"w1": kaiming(generator, a, c)}
    if rank < max(b, d) / 2:
        return made | {"w2_a": kaiming(generator, b, rank), "w2_b": torch.zeros(rank, d * math.prod(kernel))}
    return made | {"w2": torch.zeros(b, d, *kernel)}
