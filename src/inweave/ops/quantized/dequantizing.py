"""Formats that only store: W is dequantized for each product, in memory that is free again after it.

    forward    y  = x W^T + b        W = dequantized(dtype of x)
    backward   dx = dy W             dequantized again, so that nothing is kept between the two

The products are those of the dequantized layer, bit for bit, on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from inweave.ops.quantized.autograd import quantized_linear
from inweave.ops.quantized.base import QuantizedLinear, Rows, RowTensors


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


class DequantizingLinear(QuantizedLinear):
    """A layer of such a format: it saves memory, on every device."""

    #: of both sides: smaller layers hold little
    SMALLEST_SIDE = 64
    #: of the inputs
    MULTIPLE = 1

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Return whether a layer is a linear one that is large enough to save memory."""
        if not isinstance(module, nn.Linear) or isinstance(module, QuantizedLinear):
            return False
        sides = module.out_features, module.in_features
        return min(sides) >= cls.SMALLEST_SIDE and module.in_features % cls.MULTIPLE == 0

    @classmethod
    def device_problems(cls, device: torch.device) -> list[str]:
        """Return no problem: every device can dequantize."""
        return []
