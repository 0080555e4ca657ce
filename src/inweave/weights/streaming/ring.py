"""A ring of slots on the device, through which blocks pass in the order in which they run.

    block i is in slot i mod n       so the addresses of a block's tensors never change
    forward     block i runs, while i + 1 ... i + n - 1 are copied to the other slots
    backward    block i runs, while i - 1 ... i - n + 1 are copied, down to the first block that has a gradient

    acquire(i)  everything before it is done with every other slot: one event, which the copies of this call wait for

`begin` forgets what the slots hold: a recorded pass must not depend on the pass before it, and replays change slots
without a call. Another order than the expected one is slower, never wrong: a block that is not in its slot is copied
when it is acquired.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inweave.weights.streaming.copies import Copies


class Ring:
    """Slots on ``device`` for these blocks in host memory."""

    def __init__(self, blocks: Sequence[torch.Tensor], device: torch.device, copies: Copies, slots: int) -> None:
        size = max((block.numel() for block in blocks), default=0)
        self._blocks, self._copies = blocks, copies
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(slots, len(blocks)))]
        self.copied = 0  # bytes, of all passes
        self._reset()

    def _reset(self) -> None:
        self._contents: list[int | None] = [None] * len(self._slots)
        self._ready: list[Any] = [None] * len(self._slots)
        self._current: int | None = None
        self._backward = False
        self._lowest = len(self._blocks)

    def slot(self, number: int) -> torch.Tensor:
        """Return the memory that holds a block while it runs."""
        return self._slots[number % len(self._slots)]

    def begin(self) -> None:
        """Begin a forward pass: its first blocks are copied now."""
        self._reset()
        self._copies.begin()
        for number in range(len(self._slots)):
            self._copy(number, None)

    def acquire(self, number: int, *, backward: bool = False) -> None:
        """Let later work use a block; no later work uses another one until it is acquired."""
        self._backward |= backward
        if number == self._current:
            return
        done = self._copies.mark()
        self._copy(number, done)
        self._copies.wait(self._ready[number % len(self._slots)])
        self._current = number
        for distance in range(1, len(self._slots)):
            following = number - distance if self._backward else number + distance
            if (self._lowest if self._backward else 0) <= following < len(self._blocks):
                self._copy(following, done)

    def expect_backward(self, number: int) -> None:
        """Note that a block has a gradient."""
        self._lowest = min(self._lowest, number)

    def finish(self) -> None:
        """End a pass: no copy outlives it."""
        self._copies.join()

    def _copy(self, number: int, after: Any) -> None:
        """Copy a block to its slot unless it is there."""
        at = number % len(self._slots)
        if self._contents[at] == number:
            return
        source = self._blocks[number]
        self._ready[at] = self._copies.send(self.slot(number)[: source.numel()], source, after)
        self._contents[at] = number
        self.copied += source.numel()
