"""(IA)^3: one trained number per row or column, in two opposite conventions.

offset (LyCORIS):  delta = W * v          over the outputs, or over the inputs with `on_input`
factor (PEFT):     W'    = W * l          `l` starts at one; output scaling also scales the bias
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from inweave.adapter.factors import Factors
from inweave.adapter.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ia3(Factors):
    vector: Tensor
    on_input: bool
    convention: Literal["offset", "factor"]
    stored_on_input: Tensor | None = None

    kind: ClassVar[str] = "ia3"
    additive: ClassVar[bool] = False

    def shape(self) -> tuple[int, ...]:
        return (-1, self.vector.numel) if self.on_input else (self.vector.numel, -1)
