"""`quantize_rows` as one launch: a program reads its row twice, the second time from a cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inweave.ops.fp8.reference import LARGEST, SMALLEST

_WIDEST = 8192  # numbers that a program holds at once


@triton.jit
def _quantize_kernel(x, q, scales, columns, SMALL: tl.constexpr, LARGE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((BLOCK,), SMALL, tl.float32)
    undefined = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        value = tl.abs(tl.load(x + row * columns + places, mask=places < columns, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, value)
        undefined += (value != value).to(tl.int32)  # a maximum may pass over NaN
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
        warps = 4 if block <= 2048 else 8
        _quantize_kernel[(rows,)](
            x, q, scales, columns, SMALL=SMALLEST, LARGE=LARGEST, BLOCK=block, num_warps=warps
        )  # fmt: skip
    return q, scales
