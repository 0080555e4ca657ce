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
from collections.abc import Mapping
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
    kernel_in_columns: ClassVar[bool] = True

    @property
    def rank(self) -> int | None:
        if self.nominal_rank is not None:
            return self.nominal_rank
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

    def peft_tensors(self, form: Form, param: str, unscaled: bool) -> dict[str, Tensor] | str:
        if form.replaces:
            return "PEFT derives the sizes of LoKr factors from its own configuration, which cannot describe these"
        return f"{self.kind} cannot be expressed in this dialect"

    def row_roles(self) -> Mapping[str, int]:
        """Return w1's role: output rows are w1's rows times w2's, so a cut must fall between rows of w1."""
        return {"w1" if self.w1 is not None else "w1_a": self.factor_shapes()[1][0]}
