"""Weights in 8-bit floating point (e4m3): half the bits, and GEMMs at twice the speed on a GPU that supports them.

A product needs one scale per row of both factors (`inweave.ops.fp8`), so W is quantized twice, once along its outputs
and once along its inputs; both copies together take the bytes of one in 16 bits. x and dy are quantized on every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from inweave.ops.common.select import is_nvidia
from inweave.ops.fp8.autograd import fp8_linear, scaled_product
from inweave.ops.fp8.select import quantize_rows, traced_rows
from inweave.ops.quantized.base import QuantizedLinear, Rows

#: of inputs and of outputs. Quantizing x takes the time that a small product saves: on one H200 4608x3072x3072 takes
#: 81 us and 132 in bf16, 1024x1280x10240 59 and 64, 1024x1280x1280 51 and 39
SMALLEST_SIDE = 2048
MULTIPLE = 16  # of both sides, required by `_scaled_mm`
CAPABILITY = (8, 9)


class Fp8Weight(NamedTuple):
    """A weight (out, in): its rows, and those of its transpose, each in e4m3 with float32 scales (rows, 1)."""

    rows: Tensor
    row_scales: Tensor
    columns: Tensor
    column_scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Fp8Weight:
        """Quantize a matrix along both sides."""
        return cls(*quantize_rows(weight), *quantize_rows(weight.t().contiguous()))

    def split(self, count: int) -> list[Fp8Weight]:
        """Return views for ``count`` layers whose weights are rows of this one; the column scales are shared."""
        rows, scales = (torch.split(tensor, tensor.shape[0] // count) for tensor in (self.rows, self.row_scales))
        columns = torch.split(self.columns, self.columns.shape[1] // count, 1)
        return [Fp8Weight(*parts, self.column_scales) for parts in zip(rows, scales, columns, strict=True)]

    @classmethod
    def joined(cls, parts: Sequence[Fp8Weight]) -> Fp8Weight | None:
        """Return the weight that these are the `split` of, without copying; None if there is none."""
        first, count = parts[0], len(parts)
        if not _has_room(first, count):
            return None
        out, into = first.rows.shape
        whole = cls(
            first.rows.as_strided((count * out, into), (into, 1)),
            first.row_scales.as_strided((count * out, 1), (1, 1)),
            first.columns.as_strided((into, count * out), (count * out, 1)),
            first.column_scales,
        )
        same = (
            view.data_ptr() == own.data_ptr() and view.stride() == own.stride()
            for views, part in zip(whole.split(count), parts, strict=True)
            for view, own in zip(views, part, strict=True)
        )
        return whole if all(same) else None

    def format(self) -> str:
        """Return the format's name."""
        return "fp8"

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return (out, in) as the forward pass uses it."""
        return (self.rows.float() * self.row_scales).to(dtype)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b of a matrix x, with gradients."""
        return fp8_linear(x, *self, bias)

    def product(self, x: Tensor, bias: Tensor | None, rows: Rows | None) -> Tensor:
        """Return x W^T + b without a gradient; ``rows``: x, if it was quantized before."""
        rows = quantize_rows(x) if rows is None else rows
        return scaled_product(rows, self.rows, self.row_scales, bias, x.dtype, fast=True)

    def gradient(self, grad_out: Tensor, rows: Rows | None) -> Tensor:
        """Return dY W; ``rows``: dY, if it was quantized before."""
        rows = quantize_rows(grad_out) if rows is None else rows
        return scaled_product(rows, self.columns, self.column_scales, None, grad_out.dtype, fast=False)

    def traced_rows(self, x: Tensor) -> Rows | tuple[None, None]:
        """Return x in plain operations, which a compiler fuses with the one that produces x."""
        return traced_rows(x)


def _has_room(first: Fp8Weight, count: int) -> bool:
    """Return whether the memory in which the first part begins is large enough for ``count`` parts."""
    return all(
        tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize >= size * tensor.itemsize
        for tensor, size in (
            (first.rows, count * first.rows.numel()),
            (first.row_scales, count * first.row_scales.numel()),
            (first.columns, count * first.columns.numel()),
        )
    )


class Fp8Linear(QuantizedLinear):
    """A linear layer with an fp8 weight."""

    weights: ClassVar[type[Fp8Weight]] = Fp8Weight
    bytes_per_parameter: ClassVar[float] = 2

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
