"""Row normalization as kernels: a program computes the whole formula of `reference` for a few rows in registers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_kernel(
    x, added, weight, bias, total, y, means, rstds, rows, width, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, RMS: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    real = column < width
    inside = (row[:, None] < rows) & real[None, :]
    at = row[:, None].to(tl.int64) * width + column[None, :]
    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        h += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        stored = h.to(total.dtype.element_ty)
        tl.store(total + at, stored, mask=inside)
        h = stored.to(tl.float32)
    if not RMS:
        mean = tl.div_rn(tl.sum(h, axis=1), width * 1.0)
        h = tl.where(inside, h - mean[:, None], 0.0)
        tl.store(means + row, mean, mask=row < rows)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(h * h, axis=1), width * 1.0) + eps))
    tl.store(rstds + row, rstd, mask=row < rows)
    h = h * rstd[:, None]
    if WEIGHT:
        h = h * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        h = h + tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, h.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_kernel(
    dy, second, third, x, weight, means, rstds, more, dx, rows, width,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, RMS: tl.constexpr, WEIGHT: tl.constexpr, MORE: tl.constexpr,
    USES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    real = column < width
    inside = (row[:, None] < rows) & real[None, :]
    at = row[:, None].to(tl.int64) * width + column[None, :]
    n = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if USES > 1:
        g += tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    if USES > 2:
        g += tl.load(third + at, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.load(rstds + row, mask=row < rows, other=0.0)[:, None]
    if not RMS:
        n = n - tl.load(means + row, mask=row < rows, other=0.0)[:, None]
    n = tl.where(inside, n * rstd, 0.0)
    if WEIGHT:
        g = g * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)[None, :]
    result = g - n * tl.div_rn(tl.sum(g * n, axis=1), width * 1.0)[:, None]
    if not RMS:
        result -= tl.div_rn(tl.sum(g, axis=1), width * 1.0)[:, None]
    result = result * rstd
    if MORE:
        result += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)


def _tiling(rows: int, width: int) -> tuple[int, int, int]:
    """Return (columns of a tile, rows of a tile, tiles)."""
    columns = triton.next_power_of_2(width)
    count = max(2048 // columns, 1)
    return columns, count, -(-rows // count)


def row_norm(
    x: Tensor, added: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `reference.row_norm` of contiguous tensors; with ``rms`` the mean is not filled."""
    rows, width = x.shape
    columns, count, tiles = _tiling(rows, width)
    total, y = x if added is None else torch.empty_like(x), torch.empty_like(x)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    none = x  # a pointer that is not read
    _norm_kernel[(tiles,)](
        x, none if added is None else added, none if weight is None else weight, none if bias is None else bias,
        total, y, mean, rstd, rows, width, eps,
        WIDTH=columns, ROWS=count, ADD=added is not None, RMS=rms, WEIGHT=weight is not None, BIAS=bias is not None,
    )  # fmt: skip
    return total, y, mean, rstd


def row_norm_backward(
    dys: Sequence[Tensor], x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, rms: bool, more: Tensor | None
) -> Tensor:
    """Compute `reference.row_norm_backward` of contiguous tensors."""
    rows, width = x.shape
    columns, count, tiles = _tiling(rows, width)
    dx = torch.empty_like(x)
    _gradient_kernel[(tiles,)](
        dys[0], dys[min(1, len(dys) - 1)], dys[-1], x, x if weight is None else weight, mean, rstd,
        x if more is None else more, dx, rows, width,
        WIDTH=columns, ROWS=count, RMS=rms, WEIGHT=weight is not None, MORE=more is not None,
        USES=len(dys),
    )  # fmt: skip
    return dx
