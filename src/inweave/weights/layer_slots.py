"""The factors of several adapters for one layer, which adds them to its output row by row (`inweave.ops.rowwise`).

    down  (ranks of all slots, inputs)      up  (ranks of all slots, outputs)      slot -> first row, rank, scale

An adapter that changes several runs of rows of the weight has the sum of their ranks, and zeros elsewhere. Scales that
differ are relative to the largest one, as c up underflows in half precision where c is small.

Slots are written in place. The memory of factors only moves when it is too small, and then at least doubles; `most`,
by which launches are shaped, only grows. Both, and a table that moves, are counted in `RowCount.moves`: what was
recorded with another count reads other addresses. A layer's hook has one number for good, so that a layer that adds
again is as it was when its call was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from inweave.errors import InweaveError
from inweave.ops.rowwise import RowTable, SlotFactors, add_products

_LEAST_RANKS = 16


class LayerProduct(NamedTuple):
    """One product that an adapter adds: up (rows, rank) of these rows of the weight, and down (rank, inputs)."""

    down: Tensor
    up: Tensor
    scale: float
    rows: range


class LayerSlots:
    """A forward hook of a linear layer or a convolution, which adds the products of each row's slots."""

    def __init__(self, name: str, module: nn.Module, table: RowTable, rows: RowCount, slots: int) -> None:
        self.name, self.module, self.calls = name, module, 0
        self._table, self._rows = table, rows
        self._handle: RemovableHandle | None = None
        weight: Tensor = module.weight  # type: ignore[assignment]
        self._kernel = tuple(weight.shape[1:])
        empty = weight.new_empty(0, 0).detach()
        self._factors = SlotFactors(
            empty.new_zeros(0, weight[0].numel()), empty.new_zeros(0, weight.shape[0]),
            empty.new_zeros(slots, 2, dtype=torch.int32), empty.new_zeros(slots, dtype=torch.float32),
            [(0, 0, 0.0)] * slots, _LEAST_RANKS,
        )  # fmt: skip

    def attach(self) -> None:
        """Add to the layer's output from now on."""
        if self._handle is None:
            self._handle = self.module.register_forward_hook(self)
        else:
            self.module._forward_hooks[self._handle.id] = self

    def detach(self) -> None:
        """Leave the layer's output alone."""
        if self._handle is not None:
            self._handle.remove()

    def rank(self, slot: int) -> int:
        """Return the rank of a slot here; 0: it does not change this layer."""
        return self._factors.spans[slot][1]

    def put(self, slot: int, products: Sequence[LayerProduct]) -> None:
        """Write the factors of a slot, in place of earlier ones; without products, it changes nothing here."""
        if not products and not self.rank(slot):
            return
        spans, rank = self._factors.spans, sum(len(each.down) for each in products)
        spans[slot] = (0, 0, 0.0)
        start = self._room_for(rank)
        largest = max((abs(each.scale) for each in products), default=0.0) or 1.0
        spans[slot] = (start, rank, largest if rank else 0.0)
        factors = self._factors
        for each in products:
            stop = start + len(each.down)
            factors.down[start:stop].copy_(each.down.flatten(1))
            factors.up[start:stop].zero_()
            part = each.up.flatten(1).float() * (each.scale / largest)
            factors.up[start:stop, each.rows.start : each.rows.stop].copy_(part.T)
            start = stop
        factors.places[slot].copy_(torch.tensor(spans[slot][:2], dtype=torch.int32))
        factors.scales[slot].fill_(spans[slot][2])
        if rank > factors.most:
            self._factors = factors._replace(most=1 << (rank - 1).bit_length())
            self._rows.moves += 1

    def _room_for(self, rank: int) -> int:
        """Return the first row of a gap between the slots; there is more memory after this where there was none."""
        start = 0
        for first, length, _ in sorted(span for span in self._factors.spans if span[1]):
            if first - start >= rank:
                return start
            start = first + length
        down, up = self._factors.down, self._factors.up
        if start + rank > len(down):
            ranks = max(start + rank, 2 * len(down), _LEAST_RANKS)
            wider = down.new_zeros(ranks, down.shape[1]), up.new_zeros(ranks, up.shape[1])
            wider[0][: len(down)], wider[1][: len(up)] = down, up
            self._factors = self._factors._replace(down=wider[0], up=wider[1])
            self._rows.moves += 1
        return start

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Return the output with the products of each row added."""
        if not inputs:
            return None  # not counted as a call, so the caller notices
        x: Tensor = inputs[0]
        self._rows.check(self.name, x)
        self.calls += 1
        rows = x.shape[0]
        if isinstance(module, nn.Conv2d):
            tokens = output.flatten(2).transpose(1, 2)
            total = add_products(tokens, x, self._factors, self._table, self._convolve)
            return total.transpose(1, 2).reshape(output.shape)
        tokens = output.reshape(rows, -1, output.shape[-1])
        total = add_products(tokens, x.reshape(rows, -1, x.shape[-1]), self._factors, self._table)
        return total.view(output.shape)

    def _convolve(self, x: Tensor, down: Tensor) -> Tensor:
        module: Any = self.module
        inner: Tensor = module._conv_forward(x, down.view(-1, *self._kernel), None)
        return inner.flatten(2).transpose(1, 2)


class RowCount:
    """How many rows a network is called with, and what all rows get if every row gets the same."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._rows = 0
        self._same: list[tuple[int, float]] | None = None
        self.moves = 0  # how often something that kernels read had a new address, or launches another shape

    def fill(self, rows: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Set (slot, strength) of every adapter of each row."""
        self._rows, self._same = len(rows), None
        self.moves += self._table.fill(rows)

    def fill_all(self, stack: Sequence[tuple[int, float]]) -> None:
        """Set (slot, strength) of every adapter for any number of rows."""
        self._same = list(stack)

    def check(self, name: str, x: Tensor) -> None:
        """Raise if an input does not have one entry per row."""
        if self._same is not None:
            self.moves += self._table.fill([self._same] * x.shape[0])
        elif x.shape[0] != self._rows:
            raise InweaveError(f"{name}: expected an input of {self._rows} rows, got {tuple(x.shape)}")
