"""The products of each row's slots in two launches, whatever the slots are: formulas of `reference`.

    launch 1    hidden[i, t, m] = x[i, t] down_s^T               a program per row, column m and block of tokens
    launch 2    y[i, t] + sum of strength * scale * hidden up_s  a program per row, block of tokens and of outputs

Programs read the slots, and where the factors of a slot are, from device memory, and their number depends on the shapes
and the size of the tables alone: a recorded launch stays valid when slots change. A program of an empty slot ends.

Where the layer is not a plain product (a convolution), its own kernel takes the place of launch 1, for the ranks of all
slots and all rows; launch 2 reads those of a row's slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inweave.ops.rowwise.reference import Inner, SlotFactors
from inweave.ops.rowwise.table import RowTable

_TOKENS, _OUTPUTS, _DEPTH = 64, 128, 64


@triton.jit
def _inner_kernel(
    x, down, hidden, places, slots, tokens, width, most, x_row, x_token,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + tl.program_id(1))
    if slot >= 0:
        row, column = (tl.program_id(1) // COLUMNS).to(tl.int64), tl.program_id(1) % COLUMNS
        first, rank = tl.load(places + slot * 2).to(tl.int64), tl.load(places + slot * 2 + 1)
        t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        real = (t < tokens)[:, None]
        for start in range(0, rank, RANK):
            r = start + tl.arange(0, RANK)
            used = (r < rank)[None, :]
            total = tl.zeros((TOKENS, RANK), tl.float32)
            for k in range(0, width, DEPTH):
                c = k + tl.arange(0, DEPTH)
                at = x + row * x_row + t.to(tl.int64)[:, None] * x_token + c[None, :]
                a = tl.load(at, mask=real & (c < width)[None, :], other=0.0)
                b = tl.load(
                    down + (first + r)[None, :] * width + c[:, None], mask=used & (c < width)[:, None], other=0.0
                )
                total = tl.dot(a, b, total, input_precision=PRECISION)
            to = hidden + (row * tokens + t)[:, None] * (COLUMNS * most) + column * most + r[None, :]
            tl.store(to, total.to(hidden.dtype.element_ty), mask=real & used)


@triton.jit
def _outer_kernel(
    y, out, hidden, up, places, scales, slots, strengths, tokens, width, most,
    y_row, y_token, y_column, out_row, out_token, out_column, hidden_row, hidden_token, hidden_column,
    COLUMNS: tl.constexpr, ALL: tl.constexpr,  # ALL: hidden has the ranks of all slots, in the order of `up`
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    n = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    real, inside = (t < tokens)[:, None], (n < width)[None, :]
    places_y = row * y_row + t[:, None] * y_token + n[None, :] * y_column
    total = tl.load(y + places_y, mask=real & inside, other=0.0).to(tl.float32)
    for column in range(COLUMNS):
        slot = tl.load(slots + row * COLUMNS + column)
        if slot >= 0:
            first, rank = tl.load(places + slot * 2).to(tl.int64), tl.load(places + slot * 2 + 1)
            scale = tl.load(scales + slot) * tl.load(strengths + row * COLUMNS + column)
            begin = first if ALL else (column * most).to(tl.int64)
            for start in range(0, rank, RANK):
                r = start + tl.arange(0, RANK)
                used = r < rank
                at = hidden + row * hidden_row + t[:, None] * hidden_token + (begin + r)[None, :] * hidden_column
                h = tl.load(at, mask=real & used[None, :], other=0.0)
                u = tl.load(up + (first + r)[:, None] * width + n[None, :], mask=used[:, None] & inside, other=0.0)
                total += scale * tl.dot(h, u, input_precision=PRECISION)
    places_out = row * out_row + t[:, None] * out_token + n[None, :] * out_column
    tl.store(out + places_out, total.to(out.dtype.element_ty), mask=real & inside)


def add_products(y: Tensor, x: Tensor, factors: SlotFactors, table: RowTable, inner: Inner | None = None) -> Tensor:
    """Compute `reference.add_products`; the factors have the dtype of x."""
    rows, tokens, width = y.shape
    columns = table.slots.shape[1]
    block = min(_TOKENS, max(16, triton.next_power_of_2(tokens)))
    rank = min(64, max(16, triton.next_power_of_2(factors.most)))
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    if inner is None:
        x = x if x.stride(2) == 1 else x.contiguous()
        hidden = x.new_empty(rows, tokens, columns * factors.most)
        _inner_kernel[(triton.cdiv(tokens, block), rows * columns)](
            x, factors.down, hidden, factors.places, table.slots, tokens, x.shape[2], factors.most,
            x.stride(0), x.stride(1),
            COLUMNS=columns, TOKENS=block, RANK=rank, DEPTH=_DEPTH, PRECISION=precision,
        )  # fmt: skip
    else:
        hidden = inner(x, factors.down)
    out = torch.empty_like(y)
    _outer_kernel[(triton.cdiv(tokens, block), triton.cdiv(width, _OUTPUTS), rows)](
        y, out, hidden, factors.up, factors.places, factors.scales, table.slots, table.strengths,
        tokens, width, factors.most, *y.stride(), *out.stride(), *hidden.stride(),
        COLUMNS=columns, ALL=inner is not None, TOKENS=block, OUTPUTS=_OUTPUTS, RANK=rank, PRECISION=precision,
    )  # fmt: skip
    return out
