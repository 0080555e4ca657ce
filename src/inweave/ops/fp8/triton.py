"""Rows in e4m3 as one launch: a program holds its row while it looks for the largest number; a longer one is read twice.

The GELU with tanh, and its gradient, into rows: its numbers are rounded to the dtype of z first, so that the bits are those of two
kernels, one after the other. Rows are not longer than a program holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inweave.ops.activation.triton import gelu_and_slope
from inweave.ops.fp8.reference import LARGEST, SMALLEST, WIDEST


@triton.jit
def _scaled_row(value, SMALL: tl.constexpr, LARGE: tl.constexpr):
    """(numbers to round, scale) of a row in float32, with zeros where it has no numbers."""
    undefined = tl.sum((value != value).to(tl.int32), axis=0)  # a maximum may pass over NaN
    top = tl.where(undefined > 0, float("nan"), tl.maximum(tl.max(tl.abs(value), axis=0), SMALL))
    return value * tl.div_rn(LARGE, top), tl.div_rn(top, LARGE)


@triton.jit
def _row_kernel(x, q, scales, columns, SMALL: tl.constexpr, LARGE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < columns
    value = tl.load(x + row * columns + places, mask=inside, other=0.0).to(tl.float32)
    numbers, scale = _scaled_row(value, SMALL, LARGE)
    tl.store(q + row * columns + places, numbers.to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _long_row_kernel(x, q, scales, columns, SMALL: tl.constexpr, LARGE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((BLOCK,), SMALL, tl.float32)
    undefined = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        value = tl.abs(tl.load(x + row * columns + places, mask=places < columns, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, value)
        undefined += (value != value).to(tl.int32)
    top = tl.where(tl.sum(undefined, axis=0) > 0, float("nan"), tl.max(largest, axis=0))
    factor = tl.div_rn(LARGE, top)
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < columns
        value = tl.load(x + row * columns + places, mask=inside, other=0.0).to(tl.float32) * factor
        tl.store(q + row * columns + places, value.to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, tl.div_rn(top, LARGE))


@triton.jit
def _gelu_row_kernel(
    z, left, q, scales, width, left_width,
    HAS_LEFT: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    own = places - left_width
    inside = (own >= 0) & (own < width)
    n = tl.load(z + row * width + own, mask=inside, other=0.0).to(tl.float32)
    value, _ = gelu_and_slope(n, z.dtype.element_ty == tl.float32)
    value = value.to(z.dtype.element_ty).to(tl.float32)
    if HAS_LEFT:
        columns_of_left = tl.load(left + row * left_width + places, mask=own < 0, other=0.0).to(tl.float32)
        value = tl.where(own < 0, columns_of_left, value)
    numbers, scale = _scaled_row(value, SMALL, LARGE)
    columns = left_width + width
    tl.store(q + row * columns + places, numbers.to(tl.float8e4nv), mask=places < columns)
    tl.store(scales + row, scale)


@triton.jit
def _gelu_gradient_row_kernel(
    d, z, q, scales, dleft, width, left_width,
    HAS_LEFT: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr, BLOCK: tl.constexpr, LEFT_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < width
    source = d + row * (left_width + width)
    n = tl.load(z + row * width + places, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(source + left_width + places, mask=inside, other=0.0).to(tl.float32)
    _, slope = gelu_and_slope(n, z.dtype.element_ty == tl.float32)
    value = (g * slope).to(z.dtype.element_ty).to(tl.float32)
    numbers, scale = _scaled_row(value, SMALL, LARGE)
    tl.store(q + row * width + places, numbers.to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, scale)
    if HAS_LEFT:
        left_places = tl.arange(0, LEFT_BLOCK)
        copied = tl.load(source + left_places, mask=left_places < left_width, other=0.0)
        tl.store(dleft + row * left_width + left_places, copied, mask=left_places < left_width)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3, scales) of contiguous rows."""
    rows, columns = x.shape
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        kernel = _row_kernel if columns <= WIDEST else _long_row_kernel
        kernel[(rows,)](x, q, scales, columns, SMALL=SMALLEST, LARGE=LARGEST, **_held_row_options(columns))
    return q, scales


def gelu_rows(z: torch.Tensor, left: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3, scales) of [left | gelu(z)]; both are contiguous and of one dtype."""
    rows, width = z.shape
    left_width = 0 if left is None else left.shape[1]
    q = torch.empty(rows, left_width + width, dtype=torch.float8_e4m3fn, device=z.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=z.device)
    _gelu_row_kernel[(rows,)](
        z, z if left is None else left, q, scales, width, left_width,
        HAS_LEFT=left is not None, SMALL=SMALLEST, LARGE=LARGEST, **_held_row_options(left_width + width),
    )  # fmt: skip
    return q, scales


def gelu_gradient_rows(
    d: torch.Tensor, z: torch.Tensor, of_left: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(e4m3, scales) of the gradient of z, and that of what is left of gelu(z) if asked for; both are contiguous."""
    rows, width = z.shape
    left_width = d.shape[1] - width
    q = torch.empty(z.shape, dtype=torch.float8_e4m3fn, device=z.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=z.device)
    dleft = z.new_empty(rows, left_width) if of_left else None
    _gelu_gradient_row_kernel[(rows,)](
        d, z, q, scales, d if dleft is None else dleft, width, left_width,  # d: not written to
        HAS_LEFT=dleft is not None and left_width > 0, SMALL=SMALLEST, LARGE=LARGEST,
        LEFT_BLOCK=triton.next_power_of_2(max(left_width, 1)), **_held_row_options(width),
    )  # fmt: skip
    return q, scales, dleft


def _held_row_options(columns: int) -> dict[str, int]:
    """How many numbers a program takes at once, and its warps."""
    block = min(triton.next_power_of_2(columns), WIDEST)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 4), 16)}
