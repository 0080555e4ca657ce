"""An algorithm of another package: the outer product of two trained vectors.

delta = scale * column @ row          column (out, 1)   row (1, in)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from inweave.adapter import Factors, Parts, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer(Factors):
    """One column and one row."""

    column: Tensor
    row: Tensor

    kind: ClassVar[str] = "outer"
    formula: ClassVar[str] = "outer.torch_parts:product"
    layer: ClassVar[str] = "outer.torch_parts:OuterBranch"
    suffixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "outer": {"outer_column.weight": "outer_column", "outer_row.weight": "outer_row"}
    }
    written: ClassVar[Mapping[str, str]] = {"column": "outer_column.weight", "row": "outer_row.weight"}

    @property
    def rank(self) -> int:
        return 1

    def shape(self) -> tuple[int, ...]:
        return (self.column.shape[0], self.row.shape[1])

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        if not parts.has("outer_column", "outer_row"):
            return
        column, row = parts.left["outer_column"], parts.left["outer_row"]
        fields, keys = parts.shared(cls)
        parts.make(cls(column=column, row=row, **fields), parts.take("outer_column", "outer_row") + keys)

    def row_roles(self) -> Mapping[str, int]:
        return {"column": 1}
