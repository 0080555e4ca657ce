"""`quantize_rows` as one launch: a program holds its row while it looks for the largest number; a longer one is read twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inweave.ops.fp8.reference import LARGEST, SMALLEST

_WIDEST = 16384  # numbers that a program holds at once


@triton.jit
def _row_kernel(x, q, scales, columns, SMALL: tl.constexpr, LARGE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < columns
    value = tl.load(x + row * columns + places, mask=inside, other=0.0).to(tl.float32)
    undefined = tl.sum((value != value).to(tl.int32), axis=0)  # a maximum may pass over NaN
    top = tl.where(undefined > 0, float("nan"), tl.maximum(tl.max(tl.abs(value), axis=0), SMALL))
    tl.store(q + row * columns + places, (value * tl.div_rn(LARGE, top)).to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, tl.div_rn(top, LARGE))


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


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3, scales) of contiguous rows."""
    rows, columns = x.shape
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = min(triton.next_power_of_2(columns), _WIDEST)
        kernel = _row_kernel if columns <= block else _long_row_kernel
        kernel[(rows,)](
            x, q, scales, columns, SMALL=SMALLEST, LARGE=LARGEST, BLOCK=block, num_warps=min(max(block // 512, 4), 16)
        )  # fmt: skip
    return q, scales
