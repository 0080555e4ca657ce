"""GLoRA: a change that depends on the weight it changes.

    new layout:  a1 (in, r)  a2 (r, in)  b1 (out, r)  b2 (r, in*k*k)    delta = scale * (W.a1.a2 + b1.b2)
    old layout:  a1 (r, in)  a2 (in, r)  b1 (r, in)   b2 (out, r)       delta = scale * (W.a2.a1 + b2.b1)

`W.a` contracts the input-channel axis of W. With `bm` the b-part is a Tucker product as in LoCon.
All four shapes are compared to distinguish the layouts. On a square weight both can fit, and the interpretation with
the smaller rank is used; at rank = width they are indistinguishable, so the new one is used, with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from inweave.adapter.contract import Parts
from inweave.adapter.factors import Factors
from inweave.adapter.tensor import Tensor, scalar

_ROLES = ("a1", "a2", "b1", "b2", "bm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Glora(Factors):
    """Four factors in one of two layouts, with an optional Tucker core `bm`."""

    a1: Tensor
    a2: Tensor
    b1: Tensor
    b2: Tensor
    bm: Tensor | None = None

    kind: ClassVar[str] = "glora"
    formula: ClassVar[str] = "inweave.ops.delta.glora:product"
    written: ClassVar[Mapping[str, str]] = {role: f"{role}.weight" for role in _ROLES}
    suffixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "lycoris": {f"{role}.weight": f"g_{role}" for role in _ROLES}
    }
    additive: ClassVar[bool] = False

    @property
    def layouts(self) -> tuple[Literal["new", "old"], ...]:
        """Every layout that the four shapes allow; the first, with the smaller rank, is used."""
        possible: list[tuple[int, Literal["new", "old"]]] = []
        orders: tuple[tuple[Literal["new", "old"], tuple[Tensor, Tensor, Tensor, Tensor]], ...] = (
            ("new", (self.a1, self.a2, self.b1, self.b2)),
            ("old", (self.a2, self.a1, self.b2, self.b1)),
        )
        for name, (left, right, out, into) in orders:
            rank = left.shape[1]
            if left.shape[0] == right.shape[1] and right.shape[0] == rank == out.shape[1] == into.shape[0]:
                possible.append((rank, name))
        return tuple(name for _, name in sorted(possible, key=lambda row: row[0]))

    @property
    def layout(self) -> Literal["new", "old"]:
        """The layout that is used."""
        return (*self.layouts, "new")[0]

    @property
    def rank(self) -> int:
        return self.a1.shape[1] if self.layout == "new" else self.a1.shape[0]

    def shape(self) -> tuple[int, ...]:
        out, into = (self.b1, self.b2) if self.layout == "new" else (self.b2, self.b1)
        kernel = self.bm.shape[2:] if self.bm else into.shape[2:]
        return (out.shape[0], into.shape[1], *kernel)

    @property
    def weight_inputs(self) -> int:
        return (self.a1 if self.layout == "new" else self.a2).shape[0]

    def fits(self, shape: tuple[int, ...]) -> bool:
        return Factors.fits(self, shape) and len(shape) > 1 and shape[1] == self.weight_inputs

    def fit_key(self) -> tuple[object, ...]:
        return (*Factors.fit_key(self), self.weight_inputs)

    def formula_options(self, shape: Sequence[int] | None, weight: Any) -> dict[str, Any]:
        return {"layout": self.layout, "weight": weight}

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        roles = [f"g_{role}" for role in _ROLES if f"g_{role}" in parts.left]
        if not parts.has(*(f"g_{role}" for role in _ROLES[:4])):
            return
        own: dict[str, Any] = {role.removeprefix("g_"): parts.left[role] for role in roles}
        fields, keys = parts.shared(cls)
        keys = parts.take(*roles) + keys
        if parts.rslora:
            fields["rslora"] = True  # the only LyCORIS algorithm that does not fold it into the saved alpha
        factors = cls(**own, **fields)
        if any(len(tensor.shape) < 2 for tensor in own.values()) or not (factors.layouts or factors.bm):
            parts.malformed(keys, f"shapes fit no GLoRA layout: { {k: list(v.shape) for k, v in own.items()} }")
            return
        if len(factors.layouts) > 1 and factors.rank == factors.a1.shape[0] == factors.a1.shape[1]:
            parts.warn("GLoRA: the shapes fit both layouts; the newer one is used")
        parts.make(factors, keys)

    def alpha_tensor(self) -> dict[str, Tensor]:
        """Return alpha unchanged: rs-LoRA is a setting of the file and not folded into it."""
        if self.alpha is None:
            return {}
        return {"alpha": self.stored_alpha or scalar(self.alpha, "F64")}
