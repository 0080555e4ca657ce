"""An experiment: layer and adapter as one GEMM, whose sum is longer by the ranks.

PYTHONPATH=src:.:.gpu-bundle/site python3 bench/longer_sum.py 4608x3072x3072x16x3 4608x3072x12288x16x1

    x' = [x | S | 0]      W' = [W | s up | 0]      y = x' W'^T + b

One launch copies x beside S = x down^T, which it computes from the same tiles, and puts s up (of several layers: each in columns of its
own) into the columns that every row of W has in reserve. Today S is a product, b + s S up^T a launch that writes y, and the frozen product
reads that. Per layer: x is written once, where now y is written and read once. Where y is wider than x that is less.

The gradient of x is alike, [dY | dS] [W ; down], where x is wider than y. Measured here is the forward pass, and S by itself: cuBLAS's
product and the kernel of the backward pass that computes S again, and b + s S up^T in tiles of other shapes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product

import torch
import triton
import triton.language as tl
from bench.layer_cases import LayerCase, compile_in_parallel, micros

from inweave.ops.linear import output
from inweave.ops.linear.triton import _padded, _row_product

LAYERS = 6
#: columns in reserve are a multiple of what a product takes at a time
STEP = 64
OUTPUTS = [(64, 128, 4), *product((32, 64, 128), (64, 128, 256), (4, 8))]
DIVISIONS = [*product((16, 32, 64), (64, 128, 256), (4, 8))]


@triton.jit
def _extend_kernel(
    x, down, up, wide_x, wide_weight, rows, into, out, rank, scale, row_blocks, stride,
    COUNT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, RANKS: tl.constexpr, ROOM: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    t = tl.arange(0, ROOM)
    if program < row_blocks:
        m = program * ROWS + tl.arange(0, ROWS)
        wide = m[:, None].to(tl.int64)
        there = (m < rows)[:, None]
        r = tl.arange(0, RANKS)
        total = tl.zeros((ROWS, RANKS), tl.float32)
        for start in range(0, into, DEPTH):
            c = start + tl.arange(0, DEPTH)
            a = tl.load(x + wide * into + c[None, :], mask=there & (c < into)[None, :], other=0.0)
            b = tl.load(
                down + r[None, :].to(tl.int64) * into + c[:, None],
                mask=(r < COUNT * rank)[None, :] & (c < into)[:, None],
                other=0.0,
            )
            tl.store(wide_x + wide * stride + c[None, :], a, mask=there & (c < into)[None, :])
            total = tl.dot(a, b, total, input_precision=PRECISION)
        # ranks that are only padding are zeros already
        tl.store(
            wide_x + wide * stride + into + r[None, :],
            total.to(wide_x.dtype.element_ty),
            mask=there & (r < ROOM)[None, :],
        )
        if RANKS < ROOM:
            zeros = tl.zeros((ROWS, ROOM), wide_x.dtype.element_ty)
            tl.store(wide_x + wide * stride + into + t[None, :], zeros, mask=there & (t >= RANKS)[None, :])
    else:
        n = (program - row_blocks) * BLOCK + tl.arange(0, BLOCK)
        own = t[None, :] - (n // out)[:, None] * rank  # the column of `up` in the row's layer
        inside = (n < COUNT * out)[:, None]
        values = tl.load(up + n[:, None].to(tl.int64) * rank + own, mask=inside & (own >= 0) & (own < rank), other=0.0)
        values = (values.to(tl.float32) * scale).to(wide_weight.dtype.element_ty)
        tl.store(wide_weight + n[:, None].to(tl.int64) * stride + into + t[None, :], values, mask=inside)


@triton.jit
def _hidden_kernel(
    x, down, hidden, rows, into, ranks, ROWS: tl.constexpr, DEPTH: tl.constexpr, RANKS: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, RANKS)
    total = _row_product(x, down, m, r, rows, into, into, ranks, 1, into, DEPTH, "tf32")
    mask = (m < rows)[:, None] & (r < ranks)[None, :]
    tl.store(hidden + m[:, None] * ranks + r[None, :], total.to(hidden.dtype.element_ty), mask=mask)


def room(ranks: int) -> int:
    return triton.cdiv(ranks, STEP) * STEP  # type: ignore[no-any-return]


def forward(
    x: torch.Tensor,
    wide_weight: torch.Tensor,
    bias: torch.Tensor | None,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    division: tuple[int, int, int] = (32, 128, 4),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, [x | S | 0]); ``wide_weight`` (N of all layers, K + room)."""
    (rows, into), rank = x.shape, up.shape[1]
    count = down.shape[0] // rank
    block_rows, depth, warps = division
    wide_x = x.new_empty(rows, wide_weight.shape[1])
    row_blocks = triton.cdiv(rows, block_rows)
    _extend_kernel[(row_blocks + triton.cdiv(up.shape[0], 64),)](
        x, down, up, wide_x, wide_weight, rows, into, up.shape[0] // count, rank, scale, row_blocks, wide_x.stride(0),
        COUNT=count, ROWS=block_rows, DEPTH=depth, RANKS=_padded(count * rank), ROOM=room(count * rank), BLOCK=64,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=3,
    )  # fmt: skip
    y = torch.mm(wide_x, wide_weight.T) if bias is None else torch.addmm(bias, wide_x, wide_weight.T)
    return y, wide_x


class ForwardCase(LayerCase):
    """With several layers' weights, as they are and with columns in reserve, so that weights come from memory."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        columns = self.count * self.out
        self.bias = self.random(columns)
        self.wide = [self.random(columns, self.into + room(self.count * self.rank)) for _ in range(LAYERS)]
        self.weights = [wide[:, : self.into].contiguous() for wide in self.wide]

    def each(self, work: Callable[[int], object]) -> Callable[[], None]:
        def all_layers() -> None:
            for at in range(LAYERS):
                work(at)

        return all_layers

    def extended(self, division: tuple[int, int, int]) -> Callable[[], None]:
        return self.each(lambda at: forward(self.x, self.wide[at], self.bias, self.down, self.up, 0.5, division))

    def adapter_first(self) -> Callable[[], None]:
        return self.each(lambda at: output.forward(self.x, self.weights[at], self.bias, self.down, self.up, 0.5))

    def hidden(self) -> Callable[[], None]:
        return self.each(lambda at: torch.mm(self.x, self.down.T))

    def hidden_by_kernel(self, division: tuple[int, int, int]) -> Callable[[], None]:
        block_rows, depth, warps = division
        ranks = self.count * self.rank
        result = self.x.new_empty(self.rows, ranks)

        def launch(_: int) -> None:
            _hidden_kernel[(triton.cdiv(self.rows, block_rows),)](
                self.x, self.down, result, self.rows, self.into, ranks,
                ROWS=block_rows, DEPTH=depth, RANKS=_padded(ranks), num_warps=warps, num_stages=4,
            )  # fmt: skip

        return self.each(launch)

    def adapter_output(self, division: tuple[int, int, int]) -> Callable[[], None]:
        block_rows, block_columns, warps = division
        hidden = torch.mm(self.x, self.down.T)
        y = hidden.new_empty(self.rows, self.count * self.out)
        grid = triton.cdiv(self.rows, block_rows) * self.count, triton.cdiv(self.out, block_columns)

        def launch(_: int) -> None:
            output._output_kernel[grid](
                hidden, self.up, self.bias, y, self.rows, self.out, self.rank, 0.5, COUNT=self.count, BIAS=True,
                ROWS=block_rows, COLUMNS=block_columns, RANK=_padded(self.rank), PRECISION="tf32", num_warps=warps,
            )  # fmt: skip

        return self.each(launch)

    def frozen(self) -> Callable[[], None]:
        return self.each(lambda at: torch.addmm(self.bias, self.x, self.weights[at].T))


def launches(name: str) -> list[Callable[[], None]]:
    case = ForwardCase(name)
    sums = [work(division) for division in DIVISIONS for work in (case.extended, case.hidden_by_kernel)]
    return sums + [case.adapter_output(shape) for shape in OUTPUTS]


def sweep(name: str) -> None:
    case = ForwardCase(name)
    today, frozen = micros(case.adapter_first()) / LAYERS, micros(case.frozen()) / LAYERS
    times = {division: micros(case.extended(division)) / LAYERS for division in DIVISIONS}
    best = min(times, key=times.__getitem__)
    kernel_times = {division: micros(case.hidden_by_kernel(division)) / LAYERS for division in DIVISIONS}
    fastest = min(kernel_times, key=kernel_times.__getitem__)
    adapter_output = {division: micros(case.adapter_output(division)) / LAYERS for division in OUTPUTS}
    shortest = min(adapter_output, key=adapter_output.__getitem__)
    y, _ = forward(case.x, case.wide[0], case.bias, case.down, case.up, 0.5, best)
    other, _ = output.forward(case.x, case.weights[0], case.bias, case.down, case.up, 0.5)
    distance = float((y.float() - other.float()).norm() / other.float().norm())
    print(
        f"{name}: frozen {frozen:.1f} us, with the adapter today {today:.1f}, as one sum {times[best]:.1f} {best}, "
        f"distance {distance:.1e}; S {micros(case.hidden()) / LAYERS:.1f}, in the kernel {kernel_times[fastest]:.1f} {fastest}; "
        f"b + s S up^T {adapter_output[OUTPUTS[0]]:.1f}, at best {adapter_output[shortest]:.1f} {shortest}",
        flush=True,
    )


if __name__ == "__main__":
    compile_in_parallel(launches, sys.argv[1:])
    for each in sys.argv[1:]:
        sweep(each)
