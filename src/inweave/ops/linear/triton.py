"""The adapter's part of the forward pass in one launch, of the backward pass in two, without atomics or large copies.

    forward     y = b + s S up^T          one launch, y is written once
                y = y + x W^T             the product reads y while it computes (beta = 1)

In the other order the adapter's product would read all of y again, and write it again. Rounding y between the two loses
less this way, since the first part is the smaller one. Several layers of one x are side by side (`inweave.ops.linear`).

    backward 1  dS = s dY up,  S = x down^T       a program per block of rows, over all columns; S only if not saved
             2  d_up   = s dY^T S                 a program per block of columns of dY, over all rows
                d_down = dS^T x,  dX = dS down    a program per block of columns of x, over all rows

Five cuBLAS products read dY and x twice each as well, but take five launches, each with too few tiles to fill a GPU.
With many rows and few columns, rows are divided among programs; their sums, in float32, are then added by a third
launch, in order. For one layer only: several layers of one x have fewer, larger products (`select`).

S and dS are rounded to the dtype of the inputs. Sums are in float32; their order depends on the shape alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inweave.ops.common.select import on_device_of

#: the most programs of the second launch: about three for each multiprocessor of a large GPU
_PROGRAMS = 384
_MOST_SPLITS = 16
#: numbers that a program of the third launch adds: few, so that there are many programs
_SUM_BLOCK = 256
#: of a tile of the forward pass
_ROWS, _COLUMNS = 64, 128


class TileSizes(NamedTuple):
    """Tile sizes of both launches of the backward pass; ``splits``: the number of parts of the rows in the second."""

    block_rows: int
    block_depth: int
    rows: int
    columns: int
    splits: int
    rank: int
    stages: int
    warps: int = 4


def tile_sizes(rows: int, out: int, into: int, rank: int, *, keeps_hidden: bool = True) -> TileSizes:
    """Return tile sizes for M, N, K, r: rules fitted to the fastest that `bench/adapter_plans.py` finds on one H200.

    If S was not saved, the first launch computes two products, with twice as many programs.
    """
    padded = _padded(rank)
    if rows >= 1024 and padded <= 32:
        if rows < 2048:
            block_rows, block_depth = 16, 128
        elif rows < 8192:
            block_rows, block_depth = (32, 256) if max(out, into) > 1024 else (64, 128)
        else:
            block_rows, block_depth = 64, 64
        tiles = triton.cdiv(out, 64) + triton.cdiv(into, 64)
        if padded == 16 and rows >= 2048 and 64 <= tiles <= 128:
            if keeps_hidden:
                return TileSizes(block_rows, block_depth, 32, 64, 8, padded, 4)
            block_rows, block_depth = 64, 128 if rows < 8192 else 64
        splits = max(1, min(_MOST_SPLITS, _PROGRAMS // tiles, rows // 512))
        return TileSizes(block_rows, block_depth, 64, 64, splits, padded, 4)
    block_rows = 16 if rows <= 1024 else 32 if rows < 4096 else 64
    block_depth = 256 if padded <= 32 else 128 if padded <= 64 else 64
    tile_rows = max(16, min(128 if padded <= 64 else 64, triton.next_power_of_2(rows)))
    columns = 64 if padded >= 64 and rows >= 2048 else 32
    tiles = triton.cdiv(out, columns) + triton.cdiv(into, columns)
    splits = max(1, min(_MOST_SPLITS, _PROGRAMS // 2 // tiles, rows // (4 * tile_rows)))
    return TileSizes(block_rows, block_depth, tile_rows, columns, splits, padded, 4 if padded <= 64 else 3)


def _padded(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))  # type: ignore[no-any-return]


@triton.jit
def _output_kernel(
    hidden, up, bias, y, rows, out, rank, scale,
    COUNT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0) % COUNT
    m = (tl.program_id(0) // COUNT).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANK)
    real, inside, used = (m < rows)[:, None], c < out, r < rank
    s = tl.load(hidden + m[:, None] * (COUNT * rank) + layer * rank + r[None, :], mask=real & used[None, :], other=0.0)
    at = (layer * out + c)[None, :].to(tl.int64) * rank + r[:, None]
    factor = tl.load(up + at, mask=inside[None, :] & used[:, None], other=0.0)
    total = tl.dot(s, factor, input_precision=PRECISION) * scale
    if BIAS:
        total += tl.load(bias + layer * out + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    places = m[:, None] * (COUNT * out) + layer * out + c[None, :]
    tl.store(y + places, total.to(y.dtype.element_ty), mask=real & inside[None, :])


@triton.jit
def _row_product(left, right, m, r, rows, width, rank, across, along, DEPTH: tl.constexpr, PRECISION: tl.constexpr):
    """Return left (rows, width) @ right for the rows m; right's element (c, r) is at c * across + r * along."""
    total = tl.zeros((m.shape[0], r.shape[0]), tl.float32)
    for start in range(0, width, DEPTH):
        c = start + tl.arange(0, DEPTH)
        a = tl.load(left + m[:, None] * width + c[None, :], mask=(m < rows)[:, None] & (c < width)[None, :], other=0.0)
        at = c[:, None].to(tl.int64) * across + r[None, :] * along
        b = tl.load(right + at, mask=(c < width)[:, None] & (r < rank)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def _inner_kernel(
    grad_out, up, inner, x, down, hidden, rows, out, into, rank, scale,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, RANK)
    places = m[:, None] * rank + r[None, :]
    there = (m < rows)[:, None] & (r < rank)[None, :]
    if tl.program_id(1) == tl.num_programs(1) - 1:  # dY last: the second launch reads it first
        total = _row_product(grad_out, up, m, r, rows, out, rank, rank, 1, DEPTH, PRECISION) * scale
        tl.store(inner + places, total.to(inner.dtype.element_ty), mask=there)
    else:
        total = _row_product(x, down, m, r, rows, into, rank, 1, into, DEPTH, PRECISION)
        tl.store(hidden + places, total.to(hidden.dtype.element_ty), mask=there)


@triton.jit
def _put(target, places, total, mask, ADD: tl.constexpr):
    if ADD:
        total += tl.load(target + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + places, total.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _column_kernel(
    grad_out, hidden, x, inner, down, grad_x, grad_up, grad_down, rows, out, into, rank, scale, up_tiles,
    split_rows,  # rows of a split, a multiple of ROWS
    split_size,  # numbers of a split's sums; not used without splits
    OF_X: tl.constexpr, OF_DOWN: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr, EVICTION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    first = part * split_rows
    last = tl.minimum(first + split_rows, rows)
    offset = part.to(tl.int64) * split_size
    r = tl.arange(0, RANK)
    used = r < rank
    if tile < up_tiles:
        c = tile * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((COLUMNS, RANK), tl.float32)
        for start in range(first, last, ROWS):
            m = start + tl.arange(0, ROWS)
            wide = m[:, None].to(tl.int64)
            at = m[None, :].to(tl.int64) * out + c[:, None]
            a = tl.load(grad_out + at, mask=(m < last)[None, :] & (c < out)[:, None], other=0.0)
            b = tl.load(hidden + wide * rank + r[None, :], mask=(m < last)[:, None] & used[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        places = c[:, None].to(tl.int64) * rank + r[None, :]
        mask = (c < out)[:, None] & used[None, :]
        if SPLIT:
            places += offset
        _put(grad_up, places, total * scale, mask, ADD)
    else:
        # other names: Triton requires one type per name in both branches
        d = (tile - up_tiles) * COLUMNS + tl.arange(0, COLUMNS)
        inside = d < into
        whole = tl.zeros((COLUMNS, RANK), tl.float32)
        spots = r[:, None].to(tl.int64) * into + d[None, :]
        factor = tl.load(down + spots, mask=used[:, None] & inside[None, :], other=0.0)
        for start in range(first, last, ROWS):
            m = start + tl.arange(0, ROWS)
            wide = m[:, None].to(tl.int64)
            there = (m < last)[:, None]
            s = tl.load(inner + wide * rank + r[None, :], mask=there & used[None, :], other=0.0)
            if OF_DOWN:
                source = x + m[None, :].to(tl.int64) * into + d[:, None]
                t = tl.load(source, mask=(m < last)[None, :] & inside[:, None], other=0.0)
                whole = tl.dot(t, s, whole, input_precision=PRECISION)
            if OF_X:
                result = tl.dot(s, factor, input_precision=PRECISION).to(grad_x.dtype.element_ty)
                target = grad_x + wide * into + d[None, :]
                tl.store(target, result, mask=there & inside[None, :], eviction_policy=EVICTION)
        if OF_DOWN:
            transposed = r[None, :].to(tl.int64) * into + d[:, None]
            if SPLIT:
                transposed += offset
            _put(grad_down, transposed, whole, inside[:, None] & used[None, :], ADD)


@triton.jit
def _sum_kernel(
    parts, grad_up, grad_down, up_size, size, split_size, ADD: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the sums of all splits, in order: first those of d_up, then those of d_down."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts + part * split_size + places, mask=places < size, other=0.0)
    _put(grad_up, places, total, places < up_size, ADD)
    _put(grad_down, places - up_size, total, (places >= up_size) & (places < size), ADD)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (y, S) of matrices of one dtype."""
    hidden = torch.mm(x, down.T)
    with on_device_of(x):
        y = adapter_output(hidden, up, bias, scale)
    return y.addmm_(x, weight.T), hidden


def adapter_output(hidden: Tensor, up: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Return b + s S up^T (M, N of all layers) of contiguous tensors of one dtype."""
    rows, rank = hidden.shape[0], up.shape[1]
    count = hidden.shape[1] // rank
    out = up.shape[0] // count
    y = hidden.new_empty(rows, up.shape[0])
    _output_kernel[(triton.cdiv(rows, _ROWS) * count, triton.cdiv(out, _COLUMNS))](
        hidden, up, y if bias is None else bias, y, rows, out, rank, scale,
        COUNT=count, BIAS=bias is not None, ROWS=_ROWS, COLUMNS=_COLUMNS, RANK=_padded(rank),
        PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return y


def backward(
    grad_out: Tensor,
    x: Tensor,
    hidden: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    *,
    grad_x: bool = True,
    grad_down: Tensor | None = None,
    grad_up: Tensor | None = None,
    fresh: bool = False,
    sizes: TileSizes | None = None,
) -> Tensor | None:
    """Compute `reference.backward` of one layer without a weight, on contiguous matrices.

    ``fresh``: overwrite the factors' gradients. ``sizes``: other tile sizes, for measurements.
    """
    rows, out = grad_out.shape
    rank, into = down.shape
    of_down, of_up = grad_down is not None, grad_up is not None
    again = hidden is None and of_up
    sizes = sizes or tile_sizes(rows, out, into, rank, keeps_hidden=not again)
    precision = "ieee" if grad_out.dtype == torch.float32 else "tf32"
    inner = grad_out.new_empty(rows, rank)
    s_rows = torch.empty_like(inner) if hidden is None else hidden
    if again or of_down or grad_x:
        _inner_kernel[(triton.cdiv(rows, sizes.block_rows), 2 if again else 1)](
            grad_out, up, inner, x, down, s_rows, rows, out, into, rank, scale,
            BLOCK=sizes.block_rows, DEPTH=sizes.block_depth, RANK=sizes.rank, PRECISION=precision,
            num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
    result = grad_out.new_empty(rows, into) if grad_x else None
    up_size, down_size = up.numel() if of_up else 0, down.numel() if of_down else 0
    size = up_size + down_size
    splits = sizes.splits if size else 1
    if splits > 1:
        parts = torch.empty(splits, size, dtype=torch.float32, device=x.device)
        into_up, into_down = parts, parts[0, up_size:]
    else:  # inner: a placeholder, not written to
        into_up, into_down = (inner if total is None else total for total in (grad_up, grad_down))
    up_tiles = triton.cdiv(out, sizes.columns) if of_up else 0
    tiles = up_tiles + (triton.cdiv(into, sizes.columns) if of_down or grad_x else 0)
    if tiles:
        split_rows = triton.cdiv(triton.cdiv(rows, splits), sizes.rows) * sizes.rows
        _column_kernel[(tiles, splits)](
            grad_out, s_rows, x, inner, down, inner if result is None else result, into_up, into_down,
            rows, out, into, rank, scale, up_tiles, split_rows, size,
            OF_X=grad_x, OF_DOWN=of_down, ADD=not fresh and splits == 1, SPLIT=splits > 1,
            EVICTION="evict_first" if again else "",  # leaves the cache to x and dY, which are read twice
            ROWS=sizes.rows, COLUMNS=sizes.columns, RANK=sizes.rank, PRECISION=precision,
            num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
    if splits > 1:
        _sum_kernel[(triton.cdiv(size, _SUM_BLOCK),)](
            parts, parts if grad_up is None else grad_up, parts if grad_down is None else grad_down,
            up_size, size, size, ADD=not fresh, SPLITS=splits, BLOCK=_SUM_BLOCK, num_warps=4,
        )  # fmt: skip
    return result
