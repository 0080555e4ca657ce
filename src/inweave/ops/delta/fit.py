"""Shapes: whether a change fits a weight, how it is reshaped, and the error if it does not fit.

A change fits a weight with the same number of rows and of values per row: a matrix may be added to a convolution and
vice versa. With equal numbers of axes every axis must agree, and a vector fits only a vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from inweave.errors import TargetError


def misfit(kind: str, what: str, expected: object, actual: object) -> TargetError:
    """Return the error for shapes that do not fit."""
    return TargetError(f"{kind}: {what}: expected {_described(expected)}, got {_described(actual)}")


def fitted(kind: str, change: torch.Tensor, shape: Sequence[int] | None) -> torch.Tensor:
    """Return ``change`` in the shape of the weight, or unchanged if the shape is None."""
    if shape is None or change.shape == torch.Size(shape):
        return change
    flat_equal = change.shape[:1] == torch.Size(shape[:1]) and change.numel() == math.prod(shape)
    if flat_equal and change.dim() != len(shape) and min(change.dim(), len(shape)) > 1:
        return change.reshape(tuple(shape))
    raise misfit(kind, "the change does not fit the weight", tuple(shape), change)


def flat(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as (first axis, all others), as used in the formulas."""
    if tensor.dim() < 2:
        raise misfit(kind, "a factor must be a matrix or a convolution", "2 axes or more", tensor)
    return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))


def along(kind: str, vector: torch.Tensor, weight: torch.Tensor, axis: int) -> torch.Tensor:
    """Reshape a vector of any layout so that it broadcasts along one axis of ``weight``."""
    if axis >= weight.dim():
        raise misfit(kind, f"the weight has no axis {axis}", f"{axis + 1} axes or more", weight)
    if vector.numel() != weight.shape[axis]:
        raise misfit(kind, f"one number for each index of axis {axis}", weight.shape[axis], vector)
    return vector.reshape([-1 if i == axis else 1 for i in range(weight.dim())])


def padded(weight: torch.Tensor, widen: Sequence[int] | None) -> torch.Tensor:
    """Return ``weight`` padded with zeros at the end of each axis to ``widen``, or itself if that is None."""
    if widen is None or weight.shape == torch.Size(widen):
        return weight
    if len(widen) != weight.dim() or any(new < old for new, old in zip(widen, weight.shape, strict=True)):
        raise misfit("widen", "no axis of the weight may shrink", tuple(widen), weight)
    room = [size for new, old in zip(widen, weight.shape, strict=True) for size in (new - old, 0)]
    return torch.nn.functional.pad(weight, room[::-1])


def _described(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else str(value)
