"""An experiment: the adapter's backward pass with one read of dY, for matrices that are larger than the GPU's cache.

PYTHONPATH=src:.:.gpu-bundle/site python3 bench/single_read.py 4608x3072x12288x16x1 4608x3072x3072x16x3

    1   partial sums of dS and d_up  a program per block of columns of dY and part of its rows: both from one tile
    2   dS, d_up                     the sums of the parts, in order
    3   d_down, dX                   as in `inweave.ops.linear.triton`, without dY
    4   d_down                       the sums of its parts

A part of dS is as long as dY has rows, in float32, so that blocks must be wide: 16 ranks of 256 columns write an eighth of what they
read. Printed: microseconds of both ways and of cuBLAS, and their distance from cuBLAS, whose own rounding is the scale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from bench.adapter_plans import BackwardCase
from bench.layer_cases import compile_in_parallel, micros

from inweave.ops.linear import triton as kernel
from inweave.ops.linear.reference import block_count
from inweave.ops.linear.triton import _column_kernel, _padded, _put, _sum_kernel


class Division(NamedTuple):
    rows: int
    columns: int
    splits: int
    warps: int
    stages: int


@triton.jit
def _partial_sums_kernel(
    grad_out, up, hidden, inner_parts, up_parts, rows, out, rank, scale, groups, split_rows,
    COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    layer = group // groups
    part = tl.program_id(1)
    first = part * split_rows
    last = tl.minimum(first + split_rows, rows)
    c = (group % groups) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANK)
    inside, used = c < out, r < rank
    places = (layer * out + c)[:, None].to(tl.int64) * rank + r[None, :]
    real_places = inside[:, None] & used[None, :]
    factor = tl.load(up + places, mask=real_places, other=0.0)
    total = tl.zeros((COLUMNS, RANK), tl.float32)
    own = inner_parts + group.to(tl.int64) * rows * rank
    for start in range(first, last, ROWS):
        m = start + tl.arange(0, ROWS)
        wide = m[:, None].to(tl.int64)
        there = (m < last)[:, None]
        a = tl.load(grad_out + wide * (COUNT * out) + layer * out + c[None, :], mask=there & inside[None, :], other=0.0)
        s = tl.load(hidden + wide * (COUNT * rank) + layer * rank + r[None, :], mask=there & used[None, :], other=0.0)
        inner = tl.dot(a, factor, input_precision=PRECISION)
        tl.store(own + wide * rank + r[None, :], inner, mask=there & used[None, :])
        total = tl.dot(tl.trans(a), s, total, input_precision=PRECISION)
    tl.store(up_parts + part.to(tl.int64) * (COUNT * out * rank) + places, total * scale, mask=real_places)


@triton.jit
def _gather_kernel(
    inner_parts, up_parts, inner, grad_up, rows, rank, scale, groups, up_size, inner_blocks,
    COUNT: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    size = rows * rank
    if program < inner_blocks * COUNT:
        layer = program // inner_blocks
        p = (program % inner_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for group in range(groups):
            total += tl.load(inner_parts + (layer * groups + group).to(tl.int64) * size + p, mask=p < size, other=0.0)
        spots = p // rank * (COUNT * rank) + layer * rank + p % rank
        tl.store(inner + spots, (total * scale).to(inner.dtype.element_ty), mask=p < size)
    else:
        q = (program - inner_blocks * COUNT).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        whole = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(SPLITS):
            whole += tl.load(up_parts + part * up_size + q, mask=q < up_size, other=0.0)
        _put(grad_up, q, whole, q < up_size, ADD)


def backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    hidden: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    *,
    grad_down: torch.Tensor,
    grad_up: torch.Tensor,
    fresh: bool = False,
    division: Division,
    plan: kernel.Plan,
) -> torch.Tensor:
    """As `inweave.ops.linear.triton.backward`; ``plan``: of it the division of the second launch is used."""
    rows = grad_out.shape[0]
    count, rank, into = block_count(down, up), up.shape[1], down.shape[1]
    out = up.shape[0] // count
    precision = "ieee" if grad_out.dtype == torch.float32 else "tf32"
    groups = triton.cdiv(out, division.columns)
    inner_parts = torch.empty(count * groups, rows * rank, dtype=torch.float32, device=x.device)
    up_parts = torch.empty(division.splits, up.numel(), dtype=torch.float32, device=x.device)
    inner = grad_out.new_empty(rows, count * rank)
    split_rows = triton.cdiv(triton.cdiv(rows, division.splits), division.rows) * division.rows
    _partial_sums_kernel[(count * groups, division.splits)](
        grad_out, up, hidden, inner_parts, up_parts, rows, out, rank, scale, groups, split_rows,
        COUNT=count, ROWS=division.rows, COLUMNS=division.columns, RANK=_padded(rank), PRECISION=precision,
        num_warps=division.warps, num_stages=division.stages,
    )  # fmt: skip
    inner_blocks = triton.cdiv(rows * rank, 1024)
    _gather_kernel[(inner_blocks * count + triton.cdiv(up.numel(), 1024),)](
        inner_parts, up_parts, inner, grad_up, rows, rank, scale, groups, up.numel(), inner_blocks,
        COUNT=count, ADD=not fresh, SPLITS=division.splits, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    result = grad_out.new_empty(rows, into)
    size, splits = down.numel(), plan.splits
    parts = torch.empty(splits, size, dtype=torch.float32, device=x.device) if splits > 1 else grad_down
    tile_rows = triton.cdiv(triton.cdiv(rows, splits), plan.rows) * plan.rows
    _column_kernel[(triton.cdiv(into, plan.columns), splits)](
        grad_out, hidden, x, inner, down, result, grad_up, parts, rows, out, into, rank, scale, 0, tile_rows, size,
        COUNT=count, OF_X=True, OF_DOWN=True, ADD=not fresh and splits == 1, SPLIT=splits > 1,
        ROWS=plan.rows, COLUMNS=plan.columns, RANK=_padded(rank), RANKS=_padded(count * rank), PRECISION=precision,
        num_warps=4, num_stages=plan.stages,
    )  # fmt: skip
    if splits > 1:
        _sum_kernel[(triton.cdiv(size, 1024),)](
            parts, parts, grad_down, 0, size, size, ADD=not fresh, SPLITS=splits, BLOCK=1024, num_warps=4
        )
    return result


DIVISIONS = [Division(*each) for each in product((32, 64), (128, 256, 512), (2, 4, 8, 16), (4, 8), (3,))]


def distance(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one.float() - two.float()).norm() / two.float().norm())


def launch(case: BackwardCase, division: Division) -> torch.Tensor:
    return backward(
        case.grad, case.x, case.hidden, case.down, case.up, 1.0,
        grad_down=case.totals[0], grad_up=case.totals[1], division=division, plan=case.plan,
    )  # fmt: skip


def launches(name: str) -> list[Callable[[], torch.Tensor]]:
    case = BackwardCase(name)
    return [partial(launch, case, division) for division in DIVISIONS]


def sweep(name: str) -> None:
    case = BackwardCase(name)
    print(f"{name}: cuBLAS {micros(case.products):.1f} us, two launches {micros(lambda: case.launch(case.plan)):.1f}")
    times = {division: micros(partial(launch, case, division)) for division in DIVISIONS}
    for division in sorted(times, key=times.__getitem__)[:4]:
        results = []
        for work in (partial(launch, case, division), case.products):
            for total in case.totals:
                total.zero_()
            results.append([work(), *(total.clone() for total in case.totals)])
        far = ", ".join(f"{distance(one, two):.1e}" for one, two in zip(*results, strict=True))
        print(f"    {times[division]:.1f} {tuple(division)}, distances {far}", flush=True)


if __name__ == "__main__":
    compile_in_parallel(launches, sys.argv[1:])
    for each in sys.argv[1:]:
        sweep(each)
