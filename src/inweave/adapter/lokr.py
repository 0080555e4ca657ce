"""LoKr: a Kronecker product, either factor full or low-rank.

    delta = scale * reshape(kron(w1, w2), W.shape)
    w1 = w1 | w1_a @ w1_b
    w2 = w2 | w2_a @ w2_b | Tucker: sum_ab t2[a,b,h,w] * w2_a[a,o] * w2_b[b,c]

The final reshape is essential: a convolution's kernel may be in w2's columns, or be spread over both factors (files of
April 2023). The rank is the number of rows of `w2_b`, else of `w1_b`; with two full factors there is none and the scale
is 1, unless the file or its configuration states a dimension (`nominal_rank`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from inweave.adapter.contract import Form, Parts
from inweave.adapter.factors import Factors, product_shape
from inweave.adapter.tensor import Tensor

_ROLES = ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lokr(Factors):
    """Two Kronecker factors, each full or a low-rank pair, the second with an optional Tucker core."""

    w1: Tensor | None = None
    w1_a: Tensor | None = None
    w1_b: Tensor | None = None
    w2: Tensor | None = None
    w2_a: Tensor | None = None
    w2_b: Tensor | None = None
    t2: Tensor | None = None
    nominal_rank: int | None = None

    kind: ClassVar[str] = "lokr"
    formula: ClassVar[str] = "inweave.ops.delta.lokr:product"
    layer: ClassVar[str] = "inweave.layers.lokr:LokrBranch"
    written: ClassVar[Mapping[str, str]] = {role: f"lokr_{role}" for role in _ROLES}
    suffixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "lycoris": {f"lokr_{role}": f"kr_{role}" for role in (*_ROLES[:-1], "t1", "t2")}
    }
    named_suffixes: ClassVar[tuple[str, ...]] = tuple(suffixes["lycoris"])
    diffusers_families: ClassVar[tuple[str, ...]] = ("flux2", "z-image")  # from diffusers 0.42 on
    kernel_in_columns: ClassVar[bool] = True

    @property
    def rank(self) -> int | None:
        return self.nominal_rank if self.nominal_rank is not None else self.own_rank

    @property
    def own_rank(self) -> int | None:
        """The rank of the factors themselves, which readers of a file without a configuration use."""
        if self.w2_b is not None:
            return self.w2_b.shape[0]
        return self.w1_b.shape[0] if self.w1_b is not None else None

    def complete(self) -> bool:
        """Return whether both factors are present."""
        left = self.w1 is not None or (self.w1_a is not None and self.w1_b is not None)
        right = self.w2 is not None or (self.w2_a is not None and self.w2_b is not None)
        return left and right

    def factor_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the two Kronecker factors once rebuilt."""
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

    def shape_problem(self) -> str:
        sides = ((self.w1, self.w1_a, self.w1_b, None), (self.w2, self.w2_a, self.w2_b, self.t2))
        for full, left, right, core in sides:
            if full is None and left is not None and right is not None and product_shape(left, right, core) is None:
                return "LoKr factors do not make a product"
            if full is not None and core is not None:
                return "a Tucker core next to a full factor"
        return ""

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        roles = [role for role in parts.left if role.startswith("kr_")]
        own: dict[str, Any] = {role.removeprefix("kr_"): parts.left[role] for role in roles}
        if not roles or "t1" in own or not cls(**own).complete():
            return
        fields, keys = parts.shared(cls)
        keys = parts.take(*roles) + keys
        if any(len(tensor.shape) < 2 for tensor in own.values()):
            parts.malformed(keys, "LoKr factors must have two axes or more")
            return
        factors, dimension = cls(**own, **fields), parts.dimension
        if parts.config and parts.config.peft_type == "LOKR":
            factors = replace(factors, nominal_rank=parts.config.rank_of(parts.config_name))
        elif factors.rank is None and factors.alpha and dimension and factors.alpha != dimension:
            factors = replace(factors, nominal_rank=dimension)
            parts.warn(f"LoKr with two full factors and alpha != dim: scaled by alpha / {dimension} (ss_network_dim)")
        parts.make(factors, keys)

    def kohya_tensors(self, form: Form, param: str) -> dict[str, Tensor] | str:
        if self.rank == self.own_rank or self.stored_scale is not None or self.scale == 1:
            return Factors.kohya_tensors(self, form, param)
        if self.own_rank:
            own = replace(self, nominal_rank=None, rslora=False, stored_alpha=None, alpha=self.scale * self.own_rank)
            return Factors.kohya_tensors(own, form, param)
        if self.stored_alpha is not None and not self.rslora:  # the metadata that states the rank is written, too
            return Factors.kohya_tensors(self, form, param)
        return f"LoKr with two full factors has scale 1 in this dialect, and this one has {self.scale:g}"

    def peft_tensors(self, form: Form, param: str, paired: bool) -> dict[str, Tensor] | str:
        if form.replaces:
            return "PEFT derives the sizes of LoKr factors from its own configuration, which cannot describe these"
        if form.peft_type != "LOKR":
            return f"{self.kind} cannot be expressed in this dialect"
        if self.magnitude is not None or self.transposed or self.widen is not None:
            return "PEFT has no LoKr with a DoRA magnitude, nor for a weight that is widened or stored as (in, out)"
        factor, both = form.options.get("decompose_factor"), form.options.get("decompose_both")
        if not (isinstance(factor, int) and self._made_by_peft(factor, bool(both))):
            left, right = self.factor_shapes()
            return (
                f"PEFT derives the sizes of LoKr factors from one decompose_factor, here {factor}, and the rank; "
                f"it does not make {list(left)} x {list(right)} of rank {self.own_rank or 'full'} with it"
            )
        return {self.written[role]: tensor for role, tensor in self.tensors().items()}

    @property
    def peft_rank(self) -> int:
        """The rank in PEFT's configuration: of full factors one so large that PEFT makes them full, too."""
        return self.own_rank or max(self.factor_shapes()[1])

    @classmethod
    def peft_options(cls, entries: Sequence[Factors]) -> dict[str, object]:
        lokrs = [each for each in entries if isinstance(each, Lokr)]
        both = any(each.w1 is None for each in lokrs)
        factors = [*sorted({each.factor_shapes()[0][0] for each in lokrs}), -1]
        best = max(factors, key=lambda factor: sum(each._made_by_peft(factor, both) for each in lokrs))
        return {"decompose_both": both, "decompose_factor": best}

    def _made_by_peft(self, factor: int, both: bool) -> bool:
        """Return whether PEFT makes factors of these sizes for a linear layer of this size with this configuration."""
        left, right = self.factor_shapes()
        if len(left) != 2 or len(right) != 2 or self.t2 is not None:
            return False
        sizes = [(factor, size // factor) if factor > 0 and size % factor == 0 else split_factors(size, factor)
                 for size in self.shape()]  # fmt: skip
        small = (both and 2 * self.peft_rank < max(left), 2 * self.peft_rank < max(right))
        ranks = {side.shape[1] for side in (self.w1_a, self.w2_a) if side is not None}
        return (
            list(zip(left, right, strict=True)) == sizes
            and len(ranks) < 2
            and small
            == (
                self.w1 is None,
                self.w2 is None,
            )
        )

    def row_roles(self) -> Mapping[str, int]:
        """Return w1's role: output rows are w1's rows times w2's, so a cut must fall between rows of w1."""
        return {"w1" if self.w1 is not None else "w1_a": self.factor_shapes()[1][0]}


def split_factors(size: int, factor: int = -1) -> tuple[int, int]:
    """Return (small, large) with small * large = ``size``.

    One part is ``factor`` if it divides the size, else the largest divisor up to ``factor`` and the square root; -1 is
    no limit: 250 -> (10, 25), with 5 (5, 50), with 4 (2, 125); a prime 127 -> (1, 127).
    """
    if factor > 0 and size % factor == 0:
        small = factor
    else:
        most = math.isqrt(size) if factor < 0 else min(math.isqrt(size), factor)
        small = next(part for part in range(max(most, 1), 0, -1) if size % part == 0)
    return min(small, size // small), max(small, size // small)
