"""Convolutions with a quantized weight: it is dequantized for each product, as in `dequantizing`.

    y  = conv(x, W) + b              W: the matrix (out, in * kernel) of any format, seen as (out, in, kernel)
    dx = transposed_conv(dy, W)      dequantized again, so that nothing is kept between the two

Convolutions with groups, with a padding mode other than zeros or with a padding by name stay plain (`matrix_of`).
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from inweave.ops.quantized.autograd import quantized_conv2d
from inweave.ops.quantized.base import QuantizedLayer, QuantizedLinear

_Pair = tuple[int, int]


class QuantizedConv2d(QuantizedLayer, nn.Conv2d):  # type: ignore[override]
    """A convolution with a quantized weight; there is a subclass for each format."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.out_channels, self.in_channels, *cast("_Pair", self.kernel_size)

    def forward(self, input: Tensor) -> Tensor:
        geometry = self.kernel_size, self.stride, cast("_Pair", self.padding), self.dilation
        images = input if input.dim() == 4 else input.unsqueeze(0)
        y = quantized_conv2d(images, self.quantized, self.bias, *geometry)
        return y if input.dim() == 4 else y.squeeze(0)


def convolution_of(linear: type[QuantizedLinear]) -> type[QuantizedConv2d]:
    """Return the convolution of a format."""
    facts = ("weights", "bytes_per_parameter", "scratch_per_parameter", "precisions")
    members = {name: getattr(linear, name) for name in facts} | {"__module__": linear.__module__}
    return type(linear.__name__.replace("Linear", "Conv2d"), (QuantizedConv2d,), members)
