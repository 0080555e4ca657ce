"""The frozen part of a layer: its weight is a matrix in the dtype of x, or in 8 bits (`inweave.ops.fp8`).

product    x W^T + b
gradient   dY W
"""

from __future__ import annotations

import torch

from inweave.ops.fp8 import Fp8Weight, scaled_product

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


def outputs(weight: Weight) -> int:
    return (weight.rows if isinstance(weight, Fp8Weight) else weight).shape[0]


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """(M, N), memory of its own."""
    if isinstance(weight, Fp8Weight):
        return scaled_product(x, weight.rows, weight.row_scales, bias, fast=True)
    return torch.mm(x, weight.T) if bias is None else torch.addmm(bias, x, weight.T)


def gradient(grad_out: torch.Tensor, weight: Weight) -> torch.Tensor:
    """(M, K), memory of its own."""
    if isinstance(weight, Fp8Weight):
        return scaled_product(grad_out, weight.columns, weight.column_scales, None, fast=False)
    return torch.mm(grad_out, weight)
