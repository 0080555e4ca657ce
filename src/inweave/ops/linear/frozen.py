"""The frozen part of a layer: its weight is a matrix in the dtype of x, or in 8 bits (`inweave.ops.fp8`).

product    x W^T + b
gradient   dY W
"""

from __future__ import annotations

import torch

from inweave.ops.fp8 import Fp8Weight, Rows, quantize, quantize_rows, scaled_product, traced_rows

Weight = torch.Tensor | Fp8Weight


def weight_of(weight: torch.Tensor, *scales: torch.Tensor | None) -> Weight:
    """From the tensors that an operator takes; `tensors_of` is the inverse."""
    if scales[0] is None:
        return weight
    row_scales, columns, column_scales = scales
    assert row_scales is not None and columns is not None and column_scales is not None
    return Fp8Weight(weight, row_scales, columns, column_scales)


def tensors_of(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    return weight if isinstance(weight, Fp8Weight) else (weight, None, None, None)


def rows_of(numbers: torch.Tensor | None, scales: torch.Tensor | None) -> Rows | None:
    """The same for a matrix that was quantized before."""
    return None if numbers is None or scales is None else (numbers, scales)


def outputs(weight: Weight) -> int:
    return (weight.rows if isinstance(weight, Fp8Weight) else weight).shape[0]


def traced_input(x: torch.Tensor, weight: Weight) -> Rows | tuple[None, None]:
    """The rows of x (..., K) as a weight in 8 bits is multiplied with them, for a compiler; nothing where there is none."""
    return traced_rows(x) if isinstance(weight, Fp8Weight) and quantize.is_traced() else (None, None)


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, rows: Rows | None = None) -> torch.Tensor:
    """(M, N), memory of its own; ``rows``: x, if it was quantized before."""
    if isinstance(weight, Fp8Weight):
        rows = quantize_rows(x) if rows is None else rows
        return scaled_product(rows, weight.rows, weight.row_scales, bias, x.dtype, fast=True)
    return torch.mm(x, weight.T) if bias is None else torch.addmm(bias, x, weight.T)


def gradient(grad_out: torch.Tensor, weight: Weight, rows: Rows | None = None) -> torch.Tensor:
    """(M, K), memory of its own; ``rows``: dY, if it was quantized before."""
    if isinstance(weight, Fp8Weight):
        rows = quantize_rows(grad_out) if rows is None else rows
        return scaled_product(rows, weight.columns, weight.column_scales, None, grad_out.dtype, fast=False)
    return torch.mm(grad_out, weight)
