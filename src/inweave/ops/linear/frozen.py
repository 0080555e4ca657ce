"""The frozen part of a layer: its weight is a matrix in the dtype of x, or quantized (`inweave.ops.quantized`).

product    x W^T + b
gradient   dY W
"""

from __future__ import annotations

import torch
from torch import Tensor

from inweave.ops.quantized import QuantizedWeight, Rows, restore_weight

Weight = Tensor | QuantizedWeight
#: a weight as an operator takes it: up to four tensors, and the format's name
Parts = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, str | None]


def parts_of(weight: Weight) -> Parts:
    """Return a weight as the arguments of an operator; `weight_of` is the inverse."""
    if isinstance(weight, Tensor):
        return weight, None, None, None, None
    first, second, third, fourth = (*weight, None, None, None)[:4]
    return first, second, third, fourth, weight.format()


def weight_of(format: str | None, first: Tensor, *others: Tensor | None) -> Weight:
    """Return the weight of an operator's arguments."""
    return first if format is None else restore_weight(format, first, *others)


def rows_of(numbers: Tensor | None, scales: Tensor | None) -> Rows | None:
    """Return the quantized rows of an operator's arguments; None if there are none."""
    return None if numbers is None or scales is None else (numbers, scales)


def output_count(weight: Weight) -> int:
    """Return the number of outputs."""
    first: Tensor = weight if isinstance(weight, Tensor) else weight[0]
    return first.shape[0]


def traced_input(x: Tensor, weight: Weight) -> Rows | tuple[None, None]:
    """Return x as a compiled region quantizes it for a quantized weight; (None, None) if it does not."""
    return (None, None) if isinstance(weight, Tensor) else weight.traced_rows(x)


def traced_gradient(grad_out: Tensor, weight: Weight) -> Rows | tuple[None, None]:
    """Return dY as a compiled region quantizes it for a quantized weight; (None, None) if it does not."""
    return (None, None) if isinstance(weight, Tensor) else weight.traced_gradient_rows(grad_out)


def product(x: Tensor, weight: Weight, bias: Tensor | None, rows: Rows | None = None) -> Tensor:
    """Return (M, N) in new memory; ``rows``: x, if it was quantized before."""
    if not isinstance(weight, Tensor):
        return weight.product(x, bias, rows)
    return torch.mm(x, weight.T) if bias is None else torch.addmm(bias, x, weight.T)


def gradient(grad_out: Tensor, weight: Weight, rows: Rows | None = None) -> Tensor:
    """Return (M, K) in new memory; ``rows``: dY, if it was quantized before."""
    return torch.mm(grad_out, weight) if isinstance(weight, Tensor) else weight.gradient(grad_out, rows)
