"""The sparse remainder of an extracted LoRA: single values that are added to its product."""

from __future__ import annotations

import math
from dataclasses import dataclass

from inweave.adapter.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Residual:
    """The sparse remainder stored by an extractor: values at (row, column) of the flattened weight."""

    indices: Tensor
    values: Tensor
    size: Tensor

    def shape_problem(self, changed: tuple[int, ...]) -> str:
        """Return why the values cannot be added to a change of this shape; empty if they can.

        A merge allocates as many numbers as ``size`` states, so it must be the size of the change.
        """
        if any(tensor.dtype[0] not in "IU" for tensor in (self.indices, self.size)) or self.size.numel != 2:
            return "bias_size must be two whole numbers, and bias_indices whole numbers"
        if self.indices.shape != (2, self.values.numel):
            return "bias_indices must be one (row, column) per value of bias_values"
        rows, columns = self.size.ints()
        for name, indices, size in (
            ("row", self.indices.rows(0, 1), rows),
            ("column", self.indices.rows(1, 1), columns),
        ):
            low, high = indices.int_range()
            if low < 0 or (high >= size and indices.data):
                return f"bias_indices has {name} {low if low < 0 else high}, and bias_size is {[rows, columns]}"
        if min(rows, columns) < 0 or rows * columns != math.prod(changed):
            return f"bias_size is {[rows, columns]}, and the factors change {list(changed)}"
        return ""
