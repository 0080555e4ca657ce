"""Whole values: `Full` adds to or replaces a tensor, `TokenRows` some of its rows; `Vera` scales a shared random pair.

Full, add:  W' = W + strength * scale * value
Full, set:  W' = value                               strength is ignored
TokenRows:  W'[indices] = value                      strength is ignored; PEFT's trainable_token_indices
Vera:       delta = diag(lambda_b) @ up @ diag(lambda_d) @ down     up, down shared, cut to size
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from inweave.adapter.factors import Factors
from inweave.adapter.scale import scale
from inweave.adapter.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Full(Factors):
    """``bias_rank`` is set for a LoRA's own bias, which shares its scale (alpha / rank)."""

    value: Tensor
    mode: Literal["add", "set"] = "add"
    norm: bool = False
    bias_rank: int | None = None
    inside: bool = False  # PEFT keeps it under the wrapped layer, as `base_layer.bias`

    kind: ClassVar[str] = "full"

    @property
    def algorithm(self) -> str:
        name = "norm" if self.norm else self.kind
        return name if self.magnitude is None else f"dora-{name}"

    @property
    def scale(self) -> float:
        if self.bias_rank is None:
            return 1.0
        explicit = self.stored_scale.item() if self.stored_scale else None
        return scale(self.alpha, self.bias_rank, rslora=self.rslora, explicit=explicit)

    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def needs_base(self) -> bool:
        return self.magnitude is not None or self.mode == "set"

    def rows(self, start: int, length: int) -> Self | None:
        return None if self.magnitude is not None else replace(self, value=self.value.rows(start, length))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows(Factors):
    """New rows of an embedding, for the tokens ``indices``."""

    value: Tensor
    indices: tuple[int, ...]

    kind: ClassVar[str] = "tokens"
    additive: ClassVar[bool] = False

    @property
    def scale(self) -> float:
        return 1.0

    def shape(self) -> tuple[int, ...]:
        return (-1, self.value.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Vera(Factors):
    lambda_b: Tensor
    lambda_d: Tensor
    down: Tensor
    up: Tensor

    kind: ClassVar[str] = "vera"

    @property
    def rank(self) -> int:
        return self.lambda_d.numel

    @property
    def scale(self) -> float:
        return 1.0

    def shape(self) -> tuple[int, ...]:
        return (self.lambda_b.numel, -1)

    def rows(self, start: int, length: int) -> Self | None:
        return replace(self, lambda_b=self.lambda_b.rows(start, length), up=self.up.rows(start, length))
