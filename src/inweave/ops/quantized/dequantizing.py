"""Formats that only store: W is dequantized for each product, in memory that is free again after it.

    forward    y  = x W^T + b        W = dequantized(dtype of x)
    backward   dx = dy W             dequantized again, so that nothing is kept between the two

The products are those of the dequantized layer, bit for bit, on every device. A convolution is stored in the same way,
and computed by `inweave.ops.quantized.convolution`.

A weight that another library packed is held like that (`Packed`): it is decoded some rows at a time (`in_pieces`), so
that the numbers in between, which are wider, never exist for all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from inweave.ops.quantized.autograd import quantized_linear
from inweave.ops.quantized.base import QuantizedLinear, Rows, RowTensors, matrix_of

_PIECE = 1 << 22  # numbers


class Dequantizing(RowTensors):
    """The products of such a weight; a format adds `of`, `format` and `dequantized`."""

    __slots__ = ()

    def linear(self: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b of a matrix x, with gradients."""
        return quantized_linear(x, self, bias)

    def product(self: Any, x: Tensor, bias: Tensor | None, rows: Rows | None) -> Tensor:
        """Return x W^T + b without a gradient."""
        return functional.linear(x, self.dequantized(x.dtype), bias)

    def gradient(self: Any, grad_out: Tensor, rows: Rows | None) -> Tensor:
        """Return dY W."""
        return torch.mm(grad_out, self.dequantized(grad_out.dtype))

    def traced_rows(self, x: Tensor) -> tuple[None, None]:
        """Return that x is not quantized."""
        return None, None

    def traced_gradient_rows(self, grad_out: Tensor) -> tuple[None, None]:
        """Return that dY is not quantized."""
        return None, None


def in_pieces(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, rows: Callable[[slice], Tensor]
) -> Tensor:
    """Return a matrix whose float32 rows are computed some at a time."""
    out, into = shape
    count = max(1, _PIECE // max(into, 1))
    if count >= out:
        return rows(slice(0, out)).to(dtype)
    whole = torch.empty(shape, dtype=dtype, device=device)
    for start in range(0, out, count):
        part = slice(start, min(start + count, out))
        whole[part] = rows(part)
    return whole


class DequantizingLinear(QuantizedLinear):
    """A layer of such a format: it saves memory, on every device."""

    #: of both sides: smaller layers hold little
    SMALLEST_SIDE = 64
    #: of the inputs
    MULTIPLE = 1

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Return whether a layer is a linear one or a convolution that is large enough to save memory."""
        sides = matrix_of(module)
        return min(sides) >= cls.SMALLEST_SIDE and sides[1] % cls.MULTIPLE == 0

    @classmethod
    def device_problems(cls, device: torch.device) -> list[str]:
        """Return no problem: every device can dequantize."""
        return []


class PackedLinear(DequantizingLinear):
    """A layer whose weight a file stores like that. Models are not quantized to such a format, only loaded."""

    bytes_per_parameter: ClassVar[float] = 1
    scratch_per_parameter: ClassVar[float] = 4

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Return False."""
        return False
