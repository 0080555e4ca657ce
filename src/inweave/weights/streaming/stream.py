"""A network whose frozen blocks stay in host memory and are copied to the device one after the other.

    root's forward        `Ring.begin`                       its end: `Ring.finish`
    block's forward       `Ring.acquire`                     also where it is recomputed in the backward pass
    gradient of a block's output   `Ring.acquire`, backward  before any operation of the block's backward pass
    end of backward       `Ring.finish`

A block's backward pass is over when the gradient of an earlier block's output is computed: autograd runs the node that
was made last among those that are ready, and all nodes of a block were made after those of the blocks before it.

Weights are frozen, so they are copied one way. Tensors that require a gradient, and everything outside of blocks, are
on the device all the time. Results have the same bits as without streaming.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from inweave.weights.scratch import trim_heap
from inweave.weights.streaming.arena import divide, host_memory
from inweave.weights.streaming.copies import Copies, copies_to, lock_pages
from inweave.weights.streaming.ring import Ring

SLOTS = 2


class BlockStream:
    """The blocks of one network in host memory; `start` installs the hooks, `stop` brings all tensors back to the host.

    Args:
        network: On the host.
        blocks: Those to stream, in the order in which they run; none may contain another.
        device: Where the network computes.
        slots: How many blocks are on the device at a time, two or more.
        fixed: Tensors that are never moved, in addition to those that require a gradient.
        aliases: Tensors that belong to no module and are views of the network's.
        copies: How to copy; by default the device's way.

    Raises:
        MemoryBudgetError: The host has too little memory.
    """

    def __init__(
        self,
        network: nn.Module,
        blocks: Sequence[nn.Module],
        device: torch.device,
        *,
        slots: int = SLOTS,
        fixed: Collection[torch.Tensor] = (),
        aliases: Iterable[torch.Tensor] = (),
        copies: Copies | None = None,
    ) -> None:
        self._network, self._blocks, self._device, self._count = network, list(blocks), device, slots
        self._copies = copies
        self._memories, self._rest = divide(network, self._blocks, fixed=fixed, aliases=aliases)
        for number, memory in enumerate(self._memories):  # block by block: the old memory of each is free then
            memory.gather(host_memory(memory.size, f"block {number + 1} of {len(blocks)} of {type(network).__name__}"))
            trim_heap()
        for memory in self._memories:
            weakref.finalize(self, lock_pages(memory.host, device))
        self._ring: Ring | None = None
        self._handles: list[Any] = []
        self._ends_backward = False

    @property
    def streamed_bytes(self) -> int:
        """The bytes of all blocks."""
        return sum(memory.size for memory in self._memories)

    @property
    def slot_bytes(self) -> int:
        """The bytes of all slots on the device."""
        return min(self._count, len(self._blocks)) * max((memory.size for memory in self._memories), default=0)

    @property
    def device_bytes(self) -> int:
        """The bytes on the device while the network is there: its slots, and everything outside of blocks."""
        return self.slot_bytes + self._rest.size

    @property
    def copied_bytes(self) -> int:
        """The bytes copied since `start`, but for replays of recorded passes."""
        return 0 if self._ring is None else self._ring.copied

    def start(self) -> None:
        """Move the rest of the network to the device, and stream the blocks from now on."""
        if self._ring is not None:
            return
        if self._rest.memory is None:
            self._rest.gather(host_memory(self._rest.size, f"{type(self._network).__name__} without its blocks"))
        there = self._rest.host.to(self._device, copy=True)
        ring = Ring(
            [memory.host for memory in self._memories],
            self._device,
            self._copies or copies_to(self._device),
            self._count,
        )
        self._rest.point(there)  # from here on nothing fails
        for number, memory in enumerate(self._memories):
            memory.point(ring.slot(number))
        self._ring = ring
        self._handles = [
            self._network.register_forward_pre_hook(self._begin, prepend=True),
            self._network.register_forward_hook(lambda *_: ring.finish(), always_call=True),
        ]
        for number, block in enumerate(self._blocks):
            self._handles += self._hooks(ring, number, block)

    def stop(self) -> None:
        """Let all tensors be in host memory again, where they were before `start`: frozen, so nothing is copied."""
        if self._ring is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for memory in (*self._memories, self._rest):
            memory.point(memory.host)
        for handle in self._handles:
            handle.remove()
        self._ring, self._handles = None, []  # last: an interrupted call can be repeated

    def _begin(self, *_: Any) -> None:
        self._ends_backward = False  # also after a pass that failed
        if self._ring is not None:
            self._ring.begin()

    def _hooks(self, ring: Ring, number: int, block: nn.Module) -> Iterator[Any]:
        versions: dict[int, int] = {}  # of the inputs: one that is written to in place is an output

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            versions.clear()
            versions.update((id(t), t._version) for t in _tensors_in((args, kwargs)) if not t.is_inference())
            ring.acquire(number)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = {id(tensor) for tensor in _tensors_in((args, kwargs))}
            for tensor in _tensors_in(output):
                if not tensor.requires_grad:
                    continue
                passed = id(tensor) in inputs and versions.get(id(tensor), tensor._version) == tensor._version
                if not passed:  # the gradient of an input is an earlier block's
                    ring.expect_backward(number)
                    tensor.register_hook(backward)  # type: ignore[no-untyped-call]

        def backward(_: torch.Tensor) -> None:
            ring.acquire(number, backward=True)
            if not self._ends_backward:
                self._ends_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(end)

        def end() -> None:
            self._ends_backward = False
            ring.finish()

        yield block.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        yield block.register_forward_hook(after, with_kwargs=True)


def streamed_blocks(count: int, resident: int) -> list[int]:
    """Return which of ``count`` blocks are streamed if ``resident`` of them stay on the device, evenly spread."""
    return [number for number in range(count) if (number + 1) * resident // count == number * resident // count]


def listed_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the entries of a network's outermost lists of modules, in their order: the blocks of a transformer."""
    blocks: list[nn.Module] = []
    for child in network.children():
        blocks += child if isinstance(child, nn.ModuleList) else listed_blocks(child)
    return blocks


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors_in(value)
