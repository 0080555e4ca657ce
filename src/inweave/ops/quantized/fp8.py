"""Weights in 8-bit floating point (e4m3): half the bits, and GEMMs at twice the speed on a GPU that supports them.

    W ~ rows * scales        one float32 scale per row

A product needs one scale per row of both factors (`inweave.ops.fp8`): x and dy are quantized on every call. The weight
is stored once: the backward pass folds its scales into dy.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from inweave.ops.common.select import is_nvidia
from inweave.ops.fp8.autograd import folded, fp8_linear, scaled_gradient, scaled_product
from inweave.ops.fp8.reference import LARGEST
from inweave.ops.fp8.select import quantize_rows, traced_rows
from inweave.ops.quantized.base import SMALLEST, QuantizedLinear, Rows, RowTensors, coarse

#: of inputs and of outputs. Quantizing x takes the time that a small product saves: on one H200 4608x3072x3072 takes
#: 81 us and 132 in bf16, 1024x1280x10240 59 and 64, 1024x1280x1280 51 and 39
SMALLEST_SIDE = 2048
MULTIPLE = 16  # of both sides, required by `_scaled_mm`
CAPABILITY = (8, 9)


class _Tensors(NamedTuple):
    rows: Tensor
    row_scales: Tensor


class Fp8Weight(RowTensors, _Tensors):
    """A weight (out, in): its rows in e4m3, and float32 scales (out, 1)."""

    __slots__ = ()

    @classmethod
    def of(cls, weight: Tensor) -> Fp8Weight:
        """Quantize a matrix."""
        wide = weight.float()
        scales = coarse(wide.abs().amax(1, keepdim=True).clamp_min(SMALLEST) / LARGEST)
        return cls((wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales)

    def format(self) -> str:
        """Return the format's name."""
        return "fp8"

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return (out, in) as the forward pass uses it."""
        return (self.rows.float() * self.row_scales).to(dtype)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b of a matrix x, with gradients."""
        return fp8_linear(x, self.rows, self.row_scales, bias)

    def product(self, x: Tensor, bias: Tensor | None, rows: Rows | None) -> Tensor:
        """Return x W^T + b without a gradient; ``rows``: x, if it was quantized before."""
        rows = quantize_rows(x) if rows is None else rows
        return scaled_product(rows, self.rows, self.row_scales, bias, x.dtype, fast=True)

    def gradient(self, grad_out: Tensor, rows: Rows | None) -> Tensor:
        """Return dY W; ``rows``: dY, if it was quantized before."""
        rows = quantize_rows(folded(grad_out, self.row_scales)) if rows is None else rows
        return scaled_gradient(rows, self.rows, grad_out.dtype)

    def traced_rows(self, x: Tensor) -> Rows | tuple[None, None]:
        """Return x in plain operations, which a compiler fuses with the one that produces x."""
        return traced_rows(x)

    def traced_gradient_rows(self, grad_out: Tensor) -> Rows | tuple[None, None]:
        """Return dY in plain operations."""
        return traced_rows(folded(grad_out, self.row_scales))


class Fp8Linear(QuantizedLinear):
    """A linear layer with an fp8 weight."""

    weights: ClassVar[type[Fp8Weight]] = Fp8Weight
    bytes_per_parameter: ClassVar[float] = 1
    scratch_per_parameter: ClassVar[float] = 1
    precisions: ClassVar[tuple[str, ...]] = ("bf16",)
    for_speed: ClassVar[bool] = True

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Return whether a layer is a linear one whose products are faster in 8 bits."""
        if not isinstance(module, nn.Linear) or isinstance(module, QuantizedLinear):
            return False
        sides = module.out_features, module.in_features
        return min(sides) >= SMALLEST_SIDE and not any(side % MULTIPLE for side in sides)

    @classmethod
    def device_problems(cls, device: torch.device) -> list[str]:
        """Return why a device has no such products; empty if it has them."""
        if not is_nvidia(device):
            return [f"device {device}: 8-bit products need an NVIDIA GPU"]
        if (own := torch.cuda.get_device_capability(device)) < CAPABILITY:
            name, needed = torch.cuda.get_device_name(device), f"{CAPABILITY[0]}.{CAPABILITY[1]} or more"
            return [
                f"{name} has compute capability {own[0]}.{own[1]}: 8-bit products need {needed} (Ada, Hopper and later)"
            ]
        try:
            factor, scale = (torch.ones(size, device=device) for size in ((16, 16), (16, 1)))
            rows = factor.to(torch.float8_e4m3fn)
            scaled_product((rows, scale), rows, scale, None, torch.bfloat16, fast=True)
        except (RuntimeError, AttributeError) as error:
            return [f"this torch cannot multiply 8-bit rows on {device}: {' '.join(str(error).split())[:200]}"]
        return []
