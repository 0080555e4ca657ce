"""Which rows of a batch get which slots at which strengths: two tables in device memory.

    slots[i, m], strengths[i, m]       the m-th adapter of row i; slot -1: none

The tables keep their addresses while they are large enough, so what was recorded with them stays valid when they are
filled anew, and that waits for nothing on the device. `runs` says the same on the host: neighboring rows with one slot
in the same column are one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_LEAST_ROWS = 64  # of the tables, which are small; kernels read those of the batch alone

#: (slot, strength) of every adapter of a row
Assignment = Sequence[tuple[int, float]]


class Run(NamedTuple):
    """Rows ``first`` to ``last`` - 1, which get one slot, each at its own strength."""

    first: int
    last: int
    slot: int
    strengths: tuple[float, ...]


class RowTable:
    """The adapters of every row, on the host and on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.runs: tuple[Run, ...] = ()
        self._filled: tuple[tuple[tuple[int, float], ...], ...] | None = None
        self._reserve(_LEAST_ROWS, 1)

    def fill(self, rows: Sequence[Assignment]) -> bool:
        """Set the adapters of every row; rows and columns beyond them are empty.

        Returns:
            Whether the tables are larger now, at other addresses.
        """
        assignments = tuple(tuple(row) for row in rows)
        if assignments == self._filled:
            return False
        count = max(map(len, assignments), default=0)
        grows = len(assignments) > self.slots.shape[0] or count > self.slots.shape[1]
        if grows:
            length, columns = self.slots.shape
            self._reserve(_enough(len(assignments), length), _enough(count, columns))
        pinned = self.device.type == "cuda"  # a copy from other memory waits for the device
        slots = torch.full(self.slots.shape, -1, dtype=torch.int32, pin_memory=pinned)
        strengths = torch.zeros(self.slots.shape, pin_memory=pinned)
        for number, row in enumerate(assignments):
            for column, (slot, strength) in enumerate(row):
                slots[number, column], strengths[number, column] = slot, strength
        self.slots.copy_(slots, non_blocking=True)
        self.strengths.copy_(strengths, non_blocking=True)
        self.runs = _runs_of(assignments, count)
        self._filled = assignments
        return grows

    def _reserve(self, rows: int, columns: int) -> None:
        self.slots = torch.full((rows, columns), -1, dtype=torch.int32, device=self.device)
        self.strengths = torch.zeros(rows, columns, device=self.device)


def _enough(needed: int, present: int) -> int:
    """Return a size that holds what is needed; it doubles, so that tables seldom move."""
    return present if needed <= present else 1 << (needed - 1).bit_length()


def _runs_of(rows: Sequence[Assignment], columns: int) -> tuple[Run, ...]:
    runs = list[Run]()
    for column in range(columns):
        first = 0
        while first < len(rows):
            slot = rows[first][column][0] if column < len(rows[first]) else -1
            last = first + 1
            while last < len(rows) and column < len(rows[last]) and rows[last][column][0] == slot:
                last += 1
            if slot >= 0:
                runs.append(Run(first, last, slot, tuple(row[column][1] for row in rows[first:last])))
            first = last
    return tuple(runs)
