"""Rows in e4m3 as one launch: a program holds its row while it finds the largest number; a longer row is read twice.

The tanh GELU, and its gradient, written as rows: its numbers are rounded to the dtype of z first, so that the bits
equal those of two kernels, one after the other. Rows are at most as long as a program can hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inweave.ops.activation.triton import gelu_and_slope
from inweave.ops.fp8.reference import LARGEST, SMALLEST, WIDEST

#: the fastest of 4, 8, 16 and 32 on one H200 at the widths of Flux and Stable Diffusion 3.5
_GELU_WARPS = 8
_GRADIENT_WARPS = 16


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(value):
    """Return the largest magnitude of a part of a row, in float32; NaN if it contains one."""
    return tl.reduce(tl.abs(value), 0, _larger)


@triton.jit
def _row_kernel(x, q, scales, columns, SMALL: tl.constexpr, LARGE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < columns
    value = tl.load(x + row * columns + places, mask=inside, other=0.0).to(tl.float32)
    top = _larger(_largest(value), SMALL)
    tl.store(q + row * columns + places, (value * tl.div_rn(LARGE, top)).to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, tl.div_rn(top, LARGE))


@triton.jit
def _long_row_kernel(x, q, scales, columns, SMALL: tl.constexpr, LARGE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((BLOCK,), SMALL, tl.float32)
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * columns + places, mask=places < columns, other=0.0).to(tl.float32)
        largest = _larger(largest, tl.abs(value))
    top = tl.reduce(largest, 0, _larger)
    factor = tl.div_rn(LARGE, top)
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < columns
        value = tl.load(x + row * columns + places, mask=inside, other=0.0).to(tl.float32) * factor
        tl.store(q + row * columns + places, value.to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, tl.div_rn(top, LARGE))


@triton.jit
def _gelu_part(z, places, width):
    """Return GELU of a part of a row, rounded, in float32; zeros outside of the row."""
    n = tl.load(z + places, mask=places < width, other=0.0)
    value, _ = gelu_and_slope(n.to(tl.float32), n.dtype == tl.float32)
    return value.to(n.dtype).to(tl.float32)


@triton.jit
def _gelu_gradient_part(d, z, places, width):
    n = tl.load(z + places, mask=places < width, other=0.0)
    g = tl.load(d + places, mask=places < width, other=0.0).to(tl.float32)
    _, slope = gelu_and_slope(n.to(tl.float32), n.dtype == tl.float32)
    return (g * slope).to(n.dtype).to(tl.float32)


@triton.jit
def _gelu_row_kernel(
    z, left, q, scales, width, left_width,
    FIRST: tl.constexpr, REST: tl.constexpr, LEFT: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    to = q + row * (left_width + width)
    z += row * width
    places = tl.arange(0, FIRST)
    first = _gelu_part(z, places, width)
    top = _larger(_largest(first), SMALL)
    if REST:
        more_places = FIRST + tl.arange(0, REST)
        rest = _gelu_part(z, more_places, width)
        top = _larger(top, _largest(rest))
    if LEFT:
        left_places = tl.arange(0, LEFT)
        other = tl.load(left + row * left_width + left_places, mask=left_places < left_width, other=0.0).to(tl.float32)
        top = _larger(top, _largest(other))
    factor = tl.div_rn(LARGE, top)
    tl.store(to + left_width + places, (first * factor).to(tl.float8e4nv), mask=places < width)
    if REST:
        tl.store(to + left_width + more_places, (rest * factor).to(tl.float8e4nv), mask=more_places < width)
    if LEFT:
        tl.store(to + left_places, (other * factor).to(tl.float8e4nv), mask=left_places < left_width)
    tl.store(scales + row, tl.div_rn(top, LARGE))


@triton.jit
def _gelu_gradient_row_kernel(
    d, z, q, scales, dleft, width, left_width,
    FIRST: tl.constexpr, REST: tl.constexpr, LEFT: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = d + row * (left_width + width)
    z += row * width
    q += row * width
    places = tl.arange(0, FIRST)
    first = _gelu_gradient_part(source + left_width, z, places, width)
    top = _larger(_largest(first), SMALL)
    if REST:
        more_places = FIRST + tl.arange(0, REST)
        rest = _gelu_gradient_part(source + left_width, z, more_places, width)
        top = _larger(top, _largest(rest))
    factor = tl.div_rn(LARGE, top)
    tl.store(q + places, (first * factor).to(tl.float8e4nv), mask=places < width)
    if REST:
        tl.store(q + more_places, (rest * factor).to(tl.float8e4nv), mask=more_places < width)
    if LEFT:
        left_places = tl.arange(0, LEFT)
        other = tl.load(source + left_places, mask=left_places < left_width, other=0.0)
        tl.store(dleft + row * left_width + left_places, other, mask=left_places < left_width)
    tl.store(scales + row, tl.div_rn(top, LARGE))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (e4m3, scales) of contiguous rows."""
    rows, columns = x.shape
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = min(triton.next_power_of_2(columns), WIDEST)
        kernel = _row_kernel if columns <= block else _long_row_kernel
        kernel[(rows,)](
            x, q, scales, columns, SMALL=SMALLEST, LARGE=LARGEST, BLOCK=block, num_warps=min(max(block // 512, 4), 16)
        )  # fmt: skip
    return q, scales


def gelu_rows(z: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (e4m3, scales) of [left | gelu(z)]; both are contiguous and have one dtype."""
    rows, width = z.shape
    left_width = 0 if left is None else left.shape[1]
    q = torch.empty(rows, left_width + width, dtype=torch.float8_e4m3fn, device=z.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=z.device)
    _gelu_row_kernel[(rows,)](
        z, z if left is None else left, q, scales, width, left_width,
        SMALL=SMALLEST, LARGE=LARGEST, num_warps=_GELU_WARPS, **_parts(width, left_width),
    )  # fmt: skip
    return q, scales


def gelu_gradient_rows(d: Tensor, z: Tensor, of_left: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (e4m3, scales) of the gradient of z, and the gradient of left if ``of_left``; d and z are contiguous."""
    rows, width = z.shape
    left_width = d.shape[1] - width
    q = torch.empty(z.shape, dtype=torch.float8_e4m3fn, device=z.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=z.device)
    dleft = z.new_empty(rows, left_width) if of_left else None
    _gelu_gradient_row_kernel[(rows,)](
        d, z, q, scales, d if dleft is None else dleft, width, left_width,  # d: not written to
        SMALL=SMALLEST, LARGE=LARGEST, num_warps=_GRADIENT_WARPS, **_parts(width, left_width if of_left else 0),
    )  # fmt: skip
    return q, scales, dleft


def _parts(width: int, left_width: int) -> dict[str, int]:
    """Divide a row into powers of two: 12288 is 8192 and 4096, since 16384 would waste a quarter of its GELUs."""
    first = max(2 ** (width.bit_length() - 1), 16)
    rest = max(width - first, 0)
    return {
        "FIRST": first,
        "REST": rest and max(triton.next_power_of_2(rest), 16),
        "LEFT": left_width and max(triton.next_power_of_2(left_width), 16),
    }
