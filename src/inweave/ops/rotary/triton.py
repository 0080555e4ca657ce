"""Joined heads as kernels: a program computes the formula of `reference` for some heads of one row of the sequence.

A program finds its part by its row, so that one launch writes the whole sequence. The numbers of a pair (2i, 2i+1) are
in one thread, so splitting and joining them moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024  # numbers of a program: two loads of 16 bytes per thread in half precision
_WARPS = 2


@triton.jit
def _pairs(x, HALF: tl.constexpr):
    """Return (x[2i], x[2i+1]) of the last axis."""
    return tl.split(tl.reshape(x, (x.shape[0], HALF, 2)))


@triton.jit
def _row_pairs(pointer, at, real, HALF: tl.constexpr):
    """Load one row and return its pairs, with an axis for heads."""
    return _pairs(tl.load(pointer + at, mask=real, other=0.0).to(tl.float32)[None, :], HALF)


@triton.jit
def _rstd(x, size, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, axis=1), size * 1.0) + eps))[:, None]


@triton.jit
def _join_kernel(
    first, second, weight, second_weight, cos, sin, y, first_rows, rows, heads, size, eps,
    first_batch_step, first_row_step, first_head_step, second_batch_step, second_row_step, second_head_step,
    SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr, TWO: tl.constexpr, NORM: tl.constexpr,
    WEIGHT: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, SIZE)
    real = column < size
    inside = (head[:, None] < heads) & real[None, :]
    x = first + batch * first_batch_step + row * first_row_step
    head_step = first_head_step
    scale = weight
    if TWO:
        late = row >= first_rows
        x = tl.where(late, second + batch * second_batch_step + (row - first_rows) * second_row_step, x)
        head_step = tl.where(late, second_head_step, first_head_step)
        scale = tl.where(late, second_weight, weight)
    n = tl.load(x + head[:, None] * head_step + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        n = n * _rstd(n, size, eps)
        if WEIGHT:
            n = n * tl.load(scale + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if ROTARY:
        even, odd = _pairs(n, SIZE // 2)
        cos_even, cos_odd = _row_pairs(cos, row * size + column, real, SIZE // 2)
        sin_even, sin_odd = _row_pairs(sin, row * size + column, real, SIZE // 2)
        n = tl.reshape(tl.join(even * cos_even - odd * sin_even, odd * cos_odd + even * sin_odd), (HEADS, SIZE))
    at = ((batch * rows + row) * heads + head[:, None]) * size + column[None, :]
    tl.store(y + at, n.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_kernel(
    dy, first, second, weight, second_weight, cos, sin, dfirst, dsecond, skipped_rows, first_rows, heads, size, eps,
    batch_step, row_step, gradient_step,
    first_batch_step, first_row_step, first_head_step, second_batch_step, second_row_step, second_head_step,
    dfirst_batch_step, dfirst_row_step, dsecond_batch_step, dsecond_row_step,
    SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr, TWO: tl.constexpr, NORM: tl.constexpr,
    WEIGHT: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // BLOCKS).to(tl.int64) + skipped_rows
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, SIZE)
    real = column < size
    inside = (head[:, None] < heads) & real[None, :]
    x = first + batch * first_batch_step + row * first_row_step
    dx = dfirst + batch * dfirst_batch_step + row * dfirst_row_step
    head_step = first_head_step
    scale = weight
    if TWO:
        late = row >= first_rows
        x = tl.where(late, second + batch * second_batch_step + (row - first_rows) * second_row_step, x)
        dx = tl.where(late, dsecond + batch * dsecond_batch_step + (row - first_rows) * dsecond_row_step, dx)
        head_step = tl.where(late, second_head_step, first_head_step)
        scale = tl.where(late, second_weight, weight)
    at = batch * batch_step + row * row_step + head[:, None] * gradient_step + column[None, :]
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if ROTARY:
        even, odd = _pairs(g, SIZE // 2)
        cos_even, cos_odd = _row_pairs(cos, row * size + column, real, SIZE // 2)
        sin_even, sin_odd = _row_pairs(sin, row * size + column, real, SIZE // 2)
        g = tl.reshape(tl.join(even * cos_even + odd * sin_odd, odd * cos_odd - even * sin_even), (HEADS, SIZE))
    if NORM:
        h = tl.load(x + head[:, None] * head_step + column[None, :], mask=inside, other=0.0).to(tl.float32)
        rstd = _rstd(h, size, eps)
        h = h * rstd
        if WEIGHT:
            g = g * tl.load(scale + column, mask=real, other=0.0).to(tl.float32)[None, :]
        g = rstd * (g - h * tl.div_rn(tl.sum(g * h, axis=1), size * 1.0)[:, None])
    tl.store(dx + head[:, None] * size + column[None, :], g.to(dx.dtype.element_ty), mask=inside)


def _tiling(heads: int, size: int) -> dict[str, int]:
    columns = triton.next_power_of_2(size)
    block = min(triton.next_power_of_2(heads), max(_TILE // columns, 1))
    return {"SIZE": columns, "HEADS": block, "BLOCKS": -(-heads // block), "num_warps": _WARPS}


def _with_dense_heads(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def join_heads(
    parts: Sequence[Tensor], weights: Sequence[Tensor | None], eps: float | None, cos: Tensor | None, sin: Tensor | None
) -> Tensor:
    """Compute `reference.join_heads`; either all parts have a weight or none."""
    first, second = (_with_dense_heads(part) for part in (parts[0], parts[-1]))
    batch, first_rows, heads, size = first.shape
    rows = sum(part.shape[1] for part in parts)
    tiling = _tiling(heads, size)
    y = torch.empty((batch, rows, heads, size), dtype=first.dtype, device=first.device)
    none = first  # a pointer that is not read
    if not y.numel():
        return y
    _join_kernel[(rows * tiling["BLOCKS"], batch)](
        first, second, none if weights[0] is None else weights[0], none if weights[-1] is None else weights[-1],
        none if cos is None else cos, none if sin is None else sin, y, first_rows, rows, heads, size,
        0.0 if eps is None else eps, *first.stride()[:3], *second.stride()[:3],
        TWO=len(parts) == 2, NORM=eps is not None, WEIGHT=weights[0] is not None, ROTARY=cos is not None, **tiling,
    )  # fmt: skip
    return y


def join_heads_backward(
    dy: Tensor,
    parts: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    eps: float | None,
    cos: Tensor | None,
    sin: Tensor | None,
    grads: Sequence[Tensor | None],
) -> None:
    """Compute `reference.join_heads_backward`; either all parts have a weight or none."""
    dy, first, second = (_with_dense_heads(tensor) for tensor in (dy, parts[0], parts[-1]))
    batch, _, heads, size = dy.shape
    tiling = _tiling(heads, size)
    # the rows of the parts that have a gradient: all, or those of one part
    skipped = 0 if grads[0] is not None else first.shape[1]
    rows = sum(grad.shape[1] for grad in grads if grad is not None)
    none = dy  # a pointer that is not read, or not written
    dfirst, dsecond = (none if grad is None else grad for grad in (grads[0], grads[-1]))
    if rows and batch:
        _gradient_kernel[(rows * tiling["BLOCKS"], batch)](
            dy, first, second, none if weights[0] is None else weights[0], none if weights[-1] is None else weights[-1],
            none if cos is None else cos, none if sin is None else sin, dfirst, dsecond,
            skipped, first.shape[1], heads, size, 0.0 if eps is None else eps,
            *dy.stride()[:3], *first.stride()[:3], *second.stride()[:3], *dfirst.stride()[:2], *dsecond.stride()[:2],
            TWO=len(parts) == 2, NORM=eps is not None, WEIGHT=weights[0] is not None, ROTARY=cos is not None, **tiling,
        )  # fmt: skip
