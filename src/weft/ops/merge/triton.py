"""The grouped merge as one launch: every tile of every weight is a program of the same grid.

    tile t = (target, row block, column block)
    acc    = base tile in float32
    for every product of the target, for every slice of its rank:
        acc += scale * (up slice @ down slice)           float32 accumulation
    out tile = round(acc)

All addresses are offsets (int64, in elements) from one base pointer a dtype, so nothing is loaded as a
pointer and slabs beyond 2^31 elements work. The tables are small tensors uploaded once; `Launch` keeps
them, so that merging the same stack again, also at other strengths, is the launch alone.

Traffic is what bounds it: each weight is read once and written once; factors come from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from weft.ops.merge.work import Target


@triton.jit
def _merge_kernel(
    base_ptr,
    out_ptr,
    factor_ptr,
    tiles,  # (number of tiles, 3) int32: target, first row, first column
    targets,  # (number of targets, 6) int64: base offset, out offset, rows, columns, first product, last product
    products,  # (number of products, 3) int64: up offset, down offset, rank
    scales,  # (number of products,) float32
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    target = tl.load(tiles + tile * 3).to(tl.int64)
    row0 = tl.load(tiles + tile * 3 + 1).to(tl.int64)
    column0 = tl.load(tiles + tile * 3 + 2).to(tl.int64)
    base_offset = tl.load(targets + target * 6)
    out_offset = tl.load(targets + target * 6 + 1)
    n_rows = tl.load(targets + target * 6 + 2)
    n_columns = tl.load(targets + target * 6 + 3)
    first = tl.load(targets + target * 6 + 4)
    last = tl.load(targets + target * 6 + 5)

    rows = row0 + tl.arange(0, BLOCK_ROWS)
    columns = column0 + tl.arange(0, BLOCK_COLUMNS)
    inside = (rows[:, None] < n_rows) & (columns[None, :] < n_columns)
    places = rows[:, None] * n_columns + columns[None, :]
    acc = tl.load(base_ptr + base_offset + places, mask=inside, other=0.0).to(tl.float32)
    for number in range(first, last):
        up_offset = tl.load(products + number * 3)
        down_offset = tl.load(products + number * 3 + 1)
        rank = tl.load(products + number * 3 + 2)
        scale = tl.load(scales + number)
        for start in range(0, rank, BLOCK_RANK):
            k = start + tl.arange(0, BLOCK_RANK)
            up = tl.load(
                factor_ptr + up_offset + rows[:, None] * rank + k[None, :],
                mask=(rows[:, None] < n_rows) & (k[None, :] < rank),
                other=0.0,
            )
            down = tl.load(
                factor_ptr + down_offset + k[:, None] * n_columns + columns[None, :],
                mask=(k[:, None] < rank) & (columns[None, :] < n_columns),
                other=0.0,
            )
            acc += scale * tl.dot(up, down, input_precision=PRECISION)
    tl.store(out_ptr + out_offset + places, acc.to(out_ptr.dtype.element_ty), mask=inside)


class Launch:
    """A prepared launch for targets of one device, one weight dtype and one factor dtype."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._keep = list(targets)  # the tables hold bare offsets: what they point into must stay alive
        self._bases, self._outs = targets[0].base, targets[0].out
        products = [product for target in targets for product in target.products]
        self._factors = products[0].up if products else targets[0].base
        self._exact = self._factors.dtype == torch.float32
        self._block = (64, 64) if self._exact else (128, 128)
        widest = max((product.up.shape[1] for product in products), default=16)
        self._block_rank = min(max(triton.next_power_of_2(widest), 16), 32 if self._exact else 64)
        device = targets[0].base.device
        self._targets = torch.from_numpy(self._target_rows(targets)).to(device, non_blocking=True)
        self._products = torch.from_numpy(self._product_rows(targets)).to(device, non_blocking=True)
        self._scales = torch.tensor([p.scale for p in products] or [0.0], dtype=torch.float32, device=device)
        shapes = np.array([target.base.shape for target in targets], dtype=np.int64)
        self._tiles = torch.from_numpy(_tiles(shapes, *self._block)).to(device, non_blocking=True)

    def _target_rows(self, targets: Sequence[Target]) -> np.ndarray:
        counts = np.array([len(target.products) for target in targets], dtype=np.int64)
        last = np.cumsum(counts)
        bases = np.array([target.base.data_ptr() for target in targets], dtype=np.int64)
        outs = np.array([target.out.data_ptr() for target in targets], dtype=np.int64)
        shapes = np.array([target.base.shape for target in targets], dtype=np.int64)
        item = self._bases.element_size()
        columns = (
            (bases - bases[0]) // item,
            (outs - outs[0]) // item,
            shapes[:, 0],
            shapes[:, 1],
            last - counts,
            last,
        )
        return np.stack(columns, axis=1)

    def _product_rows(self, targets: Sequence[Target]) -> np.ndarray:
        item, first = self._factors.element_size(), self._factors.data_ptr()
        rows = [
            ((p.up.data_ptr() - first) // item, (p.down.data_ptr() - first) // item, p.up.shape[1])
            for target in targets
            for p in target.products
        ]
        return np.array(rows or [(0, 0, 0)], dtype=np.int64)

    def rescale(self, scales: np.ndarray) -> None:
        """Other strengths for the same products, in the same order."""
        self._scales.copy_(torch.from_numpy(scales.astype(np.float32)), non_blocking=True)

    def run(self) -> None:
        _merge_kernel[(self._tiles.shape[0],)](
            self._bases,
            self._outs,
            self._factors,
            self._tiles,
            self._targets,
            self._products,
            self._scales,
            BLOCK_ROWS=self._block[0],
            BLOCK_COLUMNS=self._block[1],
            BLOCK_RANK=self._block_rank,
            PRECISION="ieee" if self._exact else "tf32",
            num_warps=4 if self._exact else 8,
        )


def _tiles(shapes: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Every (target, first row, first column), targets in order."""
    grid = -(-shapes // np.array([rows, columns]))
    counts = grid[:, 0] * grid[:, 1]
    target = np.repeat(np.arange(len(shapes)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    wide = np.repeat(grid[:, 1], counts)
    return np.stack((target, within // wide * rows, within % wide * columns), axis=1).astype(np.int32)


def merge_products(targets: Sequence[Target]) -> None:
    """Write every target's `out` in one launch."""
    if targets:
        Launch(targets).run()
