"""DoRA's magnitudes: trained norms, one per row of the weight or one per column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from inweave.adapter.tensor import Tensor, stacked

Axis = Literal["out", "in"]


@dataclass(frozen=True, slots=True)
class Magnitude:
    """DoRA's trained norms: one per row of the weight (``out``) or one per column (``in``)."""

    tensor: Tensor
    axis: Axis


def magnitude_rows(magnitude: Magnitude | None, out: int, start: int, length: int) -> Magnitude | None:
    """Return the rows of an output-axis magnitude, in any layout."""
    if magnitude is None:
        return None
    tensor = magnitude.tensor
    if tensor.shape and tensor.shape[0] == out:
        return replace(magnitude, tensor=tensor.rows(start, length))
    flat = tensor.reshaped((out,)).rows(start, length)  # PEFT stores (1, out, 1, 1) for convolutions
    shape = tuple(length if size == out else size for size in tensor.shape)
    return replace(magnitude, tensor=flat.reshaped(shape))


def swapped_magnitude(magnitude: Magnitude | None) -> Magnitude | None:
    """Return an output-axis magnitude with its halves exchanged; an input-axis one is returned unchanged."""
    if magnitude is None or magnitude.axis == "in":
        return magnitude
    return replace(magnitude, tensor=magnitude.tensor.halves_exchanged())


def joined_magnitude(magnitudes: Sequence[Magnitude | None]) -> Magnitude | Literal[False] | None:
    """Return output-axis magnitudes stacked, None if there are none, False if they cannot be stacked.

    An input-axis magnitude depends on the rows of its part, so it cannot be joined.
    """
    if all(magnitude is None for magnitude in magnitudes):
        return None
    on_rows = [each.tensor for each in magnitudes if each is not None and each.axis == "out"]
    if len(on_rows) < len(magnitudes) or any(
        (each.dtype, each.shape[1:]) != (on_rows[0].dtype, on_rows[0].shape[1:]) for each in on_rows
    ):
        return False
    return Magnitude(stacked(on_rows), "out")
