"""VeRA: two trained vectors around a random pair that all modules share.

delta = diag(lambda_b) @ up @ diag(lambda_d) @ down     up, down shared, cut to size
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from inweave.adapter.contract import Parts
from inweave.adapter.factors import Factors, flat_shape
from inweave.adapter.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Vera(Factors):
    """The trained vectors `lambda_b` and `lambda_d`, and the file's shared pair `up` and `down`."""

    lambda_b: Tensor
    lambda_d: Tensor
    down: Tensor
    up: Tensor

    kind: ClassVar[str] = "vera"
    formula: ClassVar[str] = "inweave.ops.delta.vera:product"
    suffixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "peft": {"vera_lambda_b": "vera_b", "vera_lambda_d": "vera_d"}
    }
    named_suffixes: ClassVar[tuple[str, ...]] = ("vera_lambda_b", "vera_lambda_d")
    file_suffixes: ClassVar[tuple[str, ...]] = (".vera_A", ".vera_B")
    unused_file_tensors: ClassVar[str] = "VeRA projections without any lambda vectors"

    @property
    def rank(self) -> int:
        return self.lambda_d.numel

    @property
    def scale_rank(self) -> int | None:
        return None

    def shape(self) -> tuple[int, ...]:
        return (self.lambda_b.numel, -1)

    def shape_problem(self) -> str:
        up, down, rank = flat_shape(self.up), flat_shape(self.down), self.lambda_d.numel
        meets = up[1] == rank == down[0] and self.lambda_b.numel <= up[0]
        return "" if meets else "VeRA's vectors and its shared projections do not make a product"

    def fits(self, shape: tuple[int, ...]) -> bool:
        inputs = shape[0] if self.transposed and shape else math.prod(shape[1:])
        return Factors.fits(self, shape) and inputs <= flat_shape(self.down)[1]

    def fit_key(self) -> tuple[object, ...]:
        return (*Factors.fit_key(self), self.down.shape)

    def formula_options(self, shape: Sequence[int] | None, weight: Any) -> dict[str, Any]:
        return {"columns": None if shape is None else math.prod(shape[1:])}

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        if not parts.has("vera_b", "vera_d"):
            return
        lambda_b, lambda_d = parts.left["vera_b"], parts.left["vera_d"]
        keys = parts.take("vera_b", "vera_d")
        down, up = (parts.file_tensor(suffix) for suffix in cls.file_suffixes)
        if down is None or up is None:
            reason = (
                "VeRA saved without its projections (save_projection=false), which cannot be regenerated from a seed"
            )
            parts.unsupported(keys, reason)
            return
        transposed = parts.config.fan_in_fan_out if parts.config else False
        made = cls(lambda_b=lambda_b, lambda_d=lambda_d, down=down[1], up=up[1], transposed=transposed)
        parts.make(made, (*keys, down[0], up[0]))

    def rows(self, start: int, length: int) -> Self | None:
        return replace(self, lambda_b=self.lambda_b.rows(start, length), up=self.up.rows(start, length))
