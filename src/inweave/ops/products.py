"""Products with a frozen matrix, in parts of their rows that fill a GPU.

    left @ right + bias            total += left @ right

cuBLAS computes a result in tiles of about 128 x 256, each multiprocessor one at a time. Where the last round has few of them, most of
the GPU waits for one tile, which takes as long as the sum is. The rows of that round are then a product of their own, small enough that
cuBLAS divides its sums among all multiprocessors. The parts depend on the shape and the GPU alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

_TILE_ROWS, _TILE_COLUMNS = 128, 256
#: below that a tile is done before another launch has begun
_SHORTEST_SUM = 1024


def multiply(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """(M, N), memory of its own."""
    if not _first_rows(left, right):
        return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
    result = left.new_empty(left.shape[0], right.shape[1])
    for rows, part in _parts(result, left, right):
        if bias is None:
            torch.mm(part, right, out=rows)
        else:
            torch.addmm(bias, part, right, out=rows)
    return result


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """total += left @ right; returns ``total``."""
    for rows, part in _parts(total, left, right):
        rows.addmm_(part, right)
    return total


def is_divided(rows: int, columns: int, depth: int, device: torch.device) -> bool:
    """Whether a product in 16 bits on a GPU has two parts."""
    return bool(whole_rounds(rows, columns, depth, _processors(device)))


@cache
def whole_rounds(rows: int, columns: int, depth: int, processors: int) -> int:
    """Rows of a product whose tiles are whole rounds, where the other rows would leave most of the GPU idle; otherwise 0."""
    across = -(-columns // _TILE_COLUMNS)
    rounds, rest = divmod(-(-rows // _TILE_ROWS) * across, processors)
    first = rounds * processors // across * _TILE_ROWS
    return first if rounds and 0 < rest <= processors // 2 and depth >= _SHORTEST_SUM and 0 < first < rows else 0


def _parts(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    first = _first_rows(left, right)
    sizes = [first, left.shape[0] - first] if first else [left.shape[0]]
    return zip(torch.split(total, sizes), torch.split(left, sizes), strict=True)


def _first_rows(left: torch.Tensor, right: torch.Tensor) -> int:
    """How many rows the first of two parts has; 0: one product is best."""
    if not left.is_cuda or left.element_size() != 2:
        return 0
    return whole_rounds(left.shape[0], right.shape[1], left.shape[1], _processors(left.device))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
