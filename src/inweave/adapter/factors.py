"""What one target tensor receives: the parts every algorithm shares.

An algorithm is one small class (`Lora`, `Loha`, ...) that knows its tensors by role, its rank and
the shape of the change it makes. The formulas are in `inweave.ops.delta`, written once.

    change(strength) = strength * delta                       additive algorithms
    delta            = scale * product(factors)               scale: see `inweave.adapter.scale`
    with a magnitude:  V = W + delta;  delta = V * magnitude / |V| - W      (DoRA)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Self

from inweave.adapter.scale import scale
from inweave.adapter.tensor import Tensor

Axis = Literal["out", "in"]


@dataclass(frozen=True, slots=True)
class Magnitude:
    """DoRA's trained norms: one per row of the weight (``out``) or one per column (``in``)."""

    tensor: Tensor
    axis: Axis


@dataclass(frozen=True, slots=True)
class Residual:
    """The sparse remainder an extractor keeps: values at (row, column) of the flattened weight."""

    indices: Tensor
    values: Tensor
    size: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Fields common to all algorithms; subclasses add their tensors.

    ``alpha`` is None when the file had none. ``stored_alpha`` and ``stored_scale`` keep the tensors
    those numbers came from, so that writing gives back the same bits. ``transposed`` marks a change
    made for a base that stores the weight as (in, out): embeddings and transformers' Conv1D.
    ``widen`` is the shape the base weight is zero-padded to before anything is added.
    """

    alpha: float | None = None
    stored_alpha: Tensor | None = None
    stored_scale: Tensor | None = None
    rslora: bool = False
    magnitude: Magnitude | None = None
    residual: Residual | None = None
    transposed: bool = False
    widen: tuple[int, ...] | None = None

    kind: ClassVar[str] = ""
    #: each output row of the change depends on that row of the weight alone
    row_local: ClassVar[bool] = True
    #: the change is a multiple of the strength and needs no base weight
    additive: ClassVar[bool] = True

    @property
    def rank(self) -> int | None:
        return None

    @property
    def scale(self) -> float:
        explicit = self.stored_scale.item() if self.stored_scale else None
        return scale(self.alpha, self.rank, rslora=self.rslora, explicit=explicit)

    @property
    def algorithm(self) -> str:
        """The name users know it by: "lora", "locon", "dora", "lokr", "norm", ..."""
        return self.kind if self.magnitude is None else f"dora-{self.kind}"

    def shape(self) -> tuple[int, ...]:
        """Of the change, before any arithmetic; `-1` where only the base can tell."""
        raise NotImplementedError(type(self).__name__)

    def tensors(self) -> dict[str, Tensor]:
        """The algorithm's own tensors by role; the shared ones (alpha, magnitude, ...) are fields."""
        shared = {f.name for f in fields(Factors)}
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in shared}
        return {role: value for role, value in own.items() if isinstance(value, Tensor)}

    def decisive_tensors(self) -> list[Tensor]:
        """Tensors that make the whole change zero if any one of them holds only zeros."""
        return []

    def rows(self, start: int, length: int) -> Self | None:
        """The same algorithm restricted to some output rows, or None where it cannot be cut there."""
        return None

    def needs_base(self) -> bool:
        return self.magnitude is not None or not self.additive

    def cuttable(self) -> bool:
        """Whether nothing shared ties the rows together: no input-axis magnitude, no sparse residual."""
        return self.residual is None and (self.magnitude is None or self.magnitude.axis == "out")

    def rows_are_local(self) -> bool:
        """Whether a slice of rows can be computed from the same rows of the base alone."""
        return self.row_local and (self.magnitude is None or self.magnitude.axis == "out")


def flat_shape(tensor: Tensor) -> tuple[int, int]:
    """(first axis, product of the rest): how every formula sees a weight."""
    return tensor.shape[0], math.prod(tensor.shape[1:])


def magnitude_rows(magnitude: Magnitude | None, out: int, start: int, length: int) -> Magnitude | None:
    """The rows of an output-axis magnitude, whichever way it is laid out."""
    if magnitude is None:
        return None
    tensor = magnitude.tensor
    if tensor.shape and tensor.shape[0] == out:
        return replace(magnitude, tensor=tensor.rows(start, length))
    flat = tensor.reshaped((out,)).rows(start, length)  # PEFT stores (1, out, 1, 1) for convolutions
    shape = tuple(length if size == out else size for size in tensor.shape)
    return replace(magnitude, tensor=flat.reshaped(shape))
