"""The grouped merge as one launch: every tile of every weight is a program of the same grid.

    tile t = (update, row block, column block)
    acc    = base tile in float32
    for every product of the update, for every slice of its rank:
        acc += scale * (up slice @ down slice)           float32 accumulation
    out tile = round(acc)
    flags[update] = 1, if a number of the tile is NaN or beyond the limit of its dtype

All addresses are offsets (int64, in elements) from one base pointer per dtype, so no pointers are loaded, and slabs
beyond 2^31 elements work. The tables are small tensors uploaded once; `PreparedMerge` keeps them, so that merging the
same stack again, also at other strengths, takes the launch alone.

Memory traffic is the limit: each weight is read once and written once; factors come from the L2 cache. Overflow is
detected in registers, and read by the host with one synchronization at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from inweave.ops.common.select import on_device_of
from inweave.ops.merge.reference import WeightUpdate, limit_of


@triton.jit
def _slice(
    up_start, down_start, rows, columns, start, rows_left, columns_left, rank, width,
    BLOCK_RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return up @ down over one slice of the rank."""
    k = start + tl.arange(0, BLOCK_RANK)
    up_mask = (rows[:, None] < rows_left) & (k[None, :] < rank)
    up = tl.load(up_start + rows[:, None] * rank + k[None, :], mask=up_mask, other=0.0)
    down_mask = (k[:, None] < rank) & (columns[None, :] < columns_left)
    down = tl.load(down_start + k[:, None] * width + columns[None, :], mask=down_mask, other=0.0)
    return tl.dot(up, down, input_precision=PRECISION)


@triton.jit
def _merge_kernel(
    base_ptr, out_ptr, factor_ptr,
    offsets,  # (tiles, 2) int64: where the tile starts in the base and in the output
    extents,  # (tiles, 8) int32: width, rows and columns left, first row and column, products from and to, update
    products,  # (products, 3) int64: up offset, down offset, rank
    scales,  # (products,) float32
    flags,  # (updates,) int32: set where a result is beyond the limit
    limit,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    ALIGN: tl.constexpr,  # every width and offset is a multiple of this, so that loads can be wide
    RANK_ALIGN: tl.constexpr,  # every rank is a multiple of this
    PRECISION: tl.constexpr, ONE_SLICE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    base_offset = tl.multiple_of(tl.load(offsets + tile * 2), ALIGN)
    out_offset = tl.multiple_of(tl.load(offsets + tile * 2 + 1), ALIGN)
    width = tl.multiple_of(tl.load(extents + tile * 8), ALIGN)
    rows_left = tl.load(extents + tile * 8 + 1)
    columns_left = tl.multiple_of(tl.load(extents + tile * 8 + 2), ALIGN)
    row0 = tl.load(extents + tile * 8 + 3).to(tl.int64)
    column0 = tl.multiple_of(tl.load(extents + tile * 8 + 4), ALIGN)
    first = tl.load(extents + tile * 8 + 5)
    last = tl.load(extents + tile * 8 + 6)
    update = tl.load(extents + tile * 8 + 7)

    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    inside = (rows[:, None] < rows_left) & (columns[None, :] < columns_left)
    places = rows[:, None] * width + columns[None, :]
    base = tl.load(base_ptr + base_offset + places, mask=inside, other=0.0, eviction_policy="evict_first")
    acc = base.to(tl.float32)
    for number in tl.range(first, last, num_stages=STAGES):
        up_offset = tl.multiple_of(tl.load(products + number * 3), RANK_ALIGN)
        down_offset = tl.multiple_of(tl.load(products + number * 3 + 1), ALIGN)
        rank = tl.multiple_of(tl.load(products + number * 3 + 2).to(tl.int32), RANK_ALIGN)
        scale = tl.load(scales + number)
        up_start = factor_ptr + up_offset + row0 * rank
        down_start = factor_ptr + down_offset + column0
        if ONE_SLICE:  # every rank fits one slice: no inner loop, so the next product's loads can start early
            acc += scale * _slice(
                up_start, down_start, rows, columns, 0, rows_left, columns_left, rank, width, BLOCK_RANK, PRECISION
            )
        else:
            for start in range(0, rank, BLOCK_RANK):
                acc += scale * _slice(
                    up_start, down_start, rows, columns, start, rows_left, columns_left, rank, width, BLOCK_RANK,
                    PRECISION,
                )  # fmt: skip
    result = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offset + places, result, mask=inside, eviction_policy="evict_first")
    size = tl.abs(result.to(tl.float32))
    unbounded = inside & ~(size <= limit)  # comparisons with NaN are false
    worst = tl.max(tl.max(unbounded.to(tl.int32), axis=1), axis=0)
    tl.store(flags + update, worst, mask=worst > 0)  # all programs store the same value here


_TABLES: dict[tuple[object, ...], tuple[Tensor, Tensor, int]] = {}


class PreparedMerge:
    """A merge that can run many times and at any scales, for updates of one device, weight dtype and factor dtype."""

    def __init__(
        self,
        updates: Sequence[WeightUpdate],
        *,
        block: tuple[int, int] | None = None,
        warps: int | None = None,
        stages: int | None = None,
    ) -> None:
        self._stages = stages or (1 if all(len(update.products) <= 1 for update in updates) else 2)
        self._keep: list[object] = list(updates)  # the tables hold offsets into these: they must stay alive
        self._bases, self._outs = updates[0].base, updates[0].out
        products = [product for update in updates for product in update.products]
        self._factors = products[0].up if products else updates[0].base
        self._exact = self._factors.dtype == torch.float32
        self._block = block or ((64, 64) if self._exact else (64, 128))
        self._warps = warps or (4 if self._exact else 2)
        ranks = [product.up.shape[1] for product in products] or [16]
        self._block_rank = min(max(triton.next_power_of_2(max(ranks)), 16), 32 if self._exact else 64)
        self._one_slice = max(ranks) <= self._block_rank
        device = updates[0].base.device
        rows = self._product_rows(updates)
        self._offsets, self._extents, align = self._tables(updates, device)
        self._align = min(align, _alignment(rows[:, 1]))
        self._rank_align = _alignment(rows[:, (0, 2)])
        self._products = torch.from_numpy(rows).to(device, non_blocking=True)
        scales = np.array([p.scale for p in products] or [0.0])
        with np.errstate(over="ignore"):
            self._scales = torch.from_numpy(scales.astype(np.float32)).to(device)
        self._flags = torch.zeros(len(updates), dtype=torch.int32, device=device)
        self._last = scales  # what `_scales` was made from

    def _tables(self, updates: Sequence[WeightUpdate], device: torch.device) -> tuple[Tensor, Tensor, int]:
        """Return the tile tables on the device; those of the same weights are cached, whatever is merged into them."""
        where = tuple((t.base.data_ptr(), t.out.data_ptr(), *t.base.shape, len(t.products)) for t in updates)
        key = (where, self._block, device)
        if key not in _TABLES:
            offsets, extents = self._tiles(updates)
            align = _alignment(offsets, extents[:, (0, 2, 4)])
            while len(_TABLES) >= 8:
                _TABLES.pop(next(iter(_TABLES)))
            _TABLES[key] = torch.from_numpy(offsets).to(device), torch.from_numpy(extents).to(device), align
        return _TABLES[key]

    def _tiles(self, updates: Sequence[WeightUpdate]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tables of all tiles: every (row block, column block) of every update, in order."""
        counts = np.array([len(update.products) for update in updates], dtype=np.int64)
        last = np.cumsum(counts)
        shapes = np.array([update.base.shape for update in updates], dtype=np.int64)
        bases = np.array([update.base.data_ptr() for update in updates], dtype=np.int64)
        outs = np.array([update.out.data_ptr() for update in updates], dtype=np.int64)
        grid = -(-shapes // np.array(self._block))
        tiles = grid[:, 0] * grid[:, 1]
        update = np.repeat(np.arange(len(shapes)), tiles)
        number = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        row0, column0 = number // grid[update, 1] * self._block[0], number % grid[update, 1] * self._block[1]
        width, item = shapes[update, 1], self._bases.element_size()
        start = row0 * width + column0
        offsets = np.stack(
            ((bases - bases[0])[update] // item + start, (outs - outs[0])[update] // item + start), axis=1
        )
        left = (shapes[update, 0] - row0, width - column0)
        extents = np.stack((width, *left, row0, column0, (last - counts)[update], last[update], update), axis=1)
        return offsets, extents.astype(np.int32)

    def _product_rows(self, updates: Sequence[WeightUpdate]) -> np.ndarray:
        item, first = self._factors.element_size(), self._factors.data_ptr()
        rows = [
            ((p.up.data_ptr() - first) // item, (p.down.data_ptr() - first) // item, p.up.shape[1])
            for update in updates
            for p in update.products
        ]
        return np.array(rows or [(0, 0, 16)], dtype=np.int64)

    def rescale(self, scales: np.ndarray) -> None:
        """Set other scales for the same products, in the same order."""
        if np.array_equal(scales, self._last):
            return
        self._last = scales
        self._scales.copy_(torch.from_numpy(scales.astype(np.float32)), non_blocking=True)

    def moved(self, old: Tensor, new: Tensor) -> PreparedMerge:
        """Return the same merge with all factors in another slab of the same layout, and scales of its own."""
        clone = copy.copy(self)
        clone._keep = [*self._keep, new]
        shift = (self._factors.data_ptr() - old.data_ptr()) // old.element_size()
        clone._factors = new[shift:]
        clone._scales = self._scales.clone()
        clone._flags = torch.zeros_like(self._flags)
        return clone

    def start(self) -> None:
        """Begin to write every update."""
        with on_device_of(self._outs):
            _merge_kernel[(self._offsets.shape[0],)](
                self._bases, self._outs, self._factors, self._offsets, self._extents, self._products, self._scales,
                self._flags, limit_of(self._outs.dtype),
                BLOCK_ROWS=self._block[0], BLOCK_COLUMNS=self._block[1], BLOCK_RANK=self._block_rank,
                ALIGN=self._align, RANK_ALIGN=self._rank_align, PRECISION="ieee" if self._exact else "tf32",
                ONE_SLICE=self._one_slice, STAGES=self._stages, num_warps=self._warps,
            )  # fmt: skip

    def finish(self) -> list[int]:
        """Wait for the end; return the indices of updates with results beyond the limit."""
        numbers = [number for number, flag in enumerate(self._flags.tolist()) if flag]
        if numbers:
            self._flags.zero_()
        return numbers

    def run(self) -> list[int]:
        """Write every update; return the indices of those with results beyond the limit."""
        self.start()
        return self.finish()


def _alignment(*tables: np.ndarray) -> int:
    """Return the largest of 16, 8 and 1 that divides every number."""
    every = int(np.bitwise_or.reduce(np.concatenate([np.abs(table).ravel() for table in tables]).astype(np.int64)))
    return next(size for size in (16, 8, 1) if every % size == 0)


def merge_products(updates: Sequence[WeightUpdate]) -> list[int]:
    """Write every update's `out` in one launch; return the indices of those with results beyond the limit."""
    return PreparedMerge(updates).run() if updates else []
