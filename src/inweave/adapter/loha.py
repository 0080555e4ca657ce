"""LoHa: the Hadamard product of two low-rank products.

    delta = scale * (w1_a @ w1_b) * (w2_a @ w2_b)                      w*_a (out, r)   w*_b (r, in*k*k)
    factor_i[o,c,h,w] = sum_ab t_i[a,b,h,w] * wi_a[a,o] * wi_b[b,c]    w*_a (r, out)   w*_b (r, in)

The second line is the Tucker form, whose `w*_a` is stored transposed. Some trainers store the four
of the first form as 4-D convolution weights; they are flattened from axis 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from inweave.adapter.contract import Form, Parts
from inweave.adapter.factors import Factors, flat_shape, product_shape
from inweave.adapter.tensor import Tensor

_ROLES = ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loha(Factors):
    """Two low-rank pairs, with optional Tucker cores `t1` and `t2`."""

    w1_a: Tensor
    w1_b: Tensor
    w2_a: Tensor
    w2_b: Tensor
    t1: Tensor | None = None
    t2: Tensor | None = None

    kind: ClassVar[str] = "loha"
    formula: ClassVar[str] = "inweave.ops.delta.loha:product"
    layer: ClassVar[str] = "inweave.layers.loha:LohaBranch"
    written: ClassVar[Mapping[str, str]] = {role: f"hada_{role}" for role in _ROLES}
    suffixes: ClassVar[Mapping[str, Mapping[str, str]]] = {"lycoris": {f"hada_{role}": role for role in _ROLES}}
    named_suffixes: ClassVar[tuple[str, ...]] = tuple(written.values())
    sides: ClassVar[tuple[str, str] | None] = ("w1_a", "w1_b")
    peft_type: ClassVar[str] = "LOHA"
    kernel_in_columns: ClassVar[bool] = True

    @property
    def rank(self) -> int:
        return self.w1_b.shape[0]

    def shape(self) -> tuple[int, ...]:
        if self.t1 is not None:
            return (self.w1_a.shape[1], self.w1_b.shape[1], *self.t1.shape[2:])
        return (self.w1_a.shape[0], flat_shape(self.w1_b)[1])

    def decisive_tensors(self) -> list[Tensor]:
        return list(self.tensors().values())

    def shape_problem(self) -> str:
        if (self.t1 is None) != (self.t2 is None):
            return "one of two Tucker cores is missing"
        left, right = product_shape(self.w1_a, self.w1_b, self.t1), product_shape(self.w2_a, self.w2_b, self.t2)
        if left is None or right is None:
            return "LoHa factors do not make a product"
        return "" if left == right else "the two products of LoHa differ in shape"

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        if not parts.has(*_ROLES[:4]):
            return
        own: dict[str, Any] = {role: parts.left[role] for role in _ROLES if role in parts.left}
        fields, keys = parts.shared(cls)
        keys = parts.take(*own) + keys
        if any(len(own[role].shape) < 2 for role in _ROLES[:4]):
            parts.malformed(keys, "LoHa factors must have two axes or more")
        else:
            parts.make(cls(**own, **fields), keys)

    def peft_tensors(self, form: Form, param: str, paired: bool) -> dict[str, Tensor] | str:
        if form.peft_type != self.peft_type:
            return f"{self.kind} cannot be expressed in this dialect"
        if self.magnitude is not None:
            return "PEFT has no LoHa with a DoRA magnitude"
        if self.transposed or self.widen is not None:
            return "PEFT has no LoHa for a weight that is widened or stored as (in, out)"
        return {self.written[role]: tensor for role, tensor in self.tensors().items()}

    @classmethod
    def peft_options(cls, entries: Sequence[Factors]) -> dict[str, object]:
        return {"use_effective_conv2d": any(isinstance(each, Loha) and each.t1 is not None for each in entries)}

    def row_roles(self) -> Mapping[str, int]:
        return {"w1_a": 1, "w2_a": 1} if self.t1 is None else {}
