"""Inputs of checkpointed blocks in host memory, from the forward pass of a block to its backward pass.

    forward    block i begins        its inputs are copied to the host beside its work
               block i + 1 begins    waits for that copy, then the inputs of block i are free on the device
    backward   block i recomputes    its inputs are on the device; those of block i - 1 are copied there meanwhile

Gradient checkpointing stores the inputs of each block and nothing else (`full`), so that this is all that grows with
the number of blocks. A tensor that earlier blocks got too (embeddings of the text, of the time) stays on the device,
as do small ones. Values are copied, so results have the same bits.

Device memory is allocated and freed on the stream of the work: a copy waits for what was launched before it, and
memory that a copy reads or writes is free only after the work has waited for the copy. Host memory is page-locked and
kept for later passes, so its addresses are the same in every pass, and all of it can be recorded in a CUDA graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from inweave.weights.streaming.arena import host_memory
from inweave.weights.streaming.copies import Copies, copies_to, lock_pages

SMALLEST = 1 << 20  # bytes; smaller inputs stay on the device


class HostActivations:
    """Host memory for the inputs of the checkpointed blocks of networks on ``device``. ``host_bytes``: all of it."""

    def __init__(self, device: torch.device, copies: Copies | None = None) -> None:
        self._device = device
        self.copies = copies or copies_to(device)
        self.host_bytes = 0
        self._free: dict[int, list[Tensor]] = {}  # by size
        self._leaving: list[_Stored] = []  # whose copies to the host the work has not waited for
        self._arriving: list[Tensor] = []  # on the device, whose copies the work has not waited for
        self._latest: weakref.ref[_Call] | None = None
        self._arguments: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._ends_backward = False

    def watch(self, network: nn.Module) -> None:
        """Let each forward pass of a network begin anew, also after one that failed."""
        network.register_forward_pre_hook(lambda *_: self._begin(), prepend=True)

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that does a block's forward pass by ``checkpoint``, its inputs in host memory."""

        def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return checkpoint(function, *arguments, **options)
            self.settle()  # before this block: the copies ran beside the one before
            tensors = [each for each in arguments if isinstance(each, Tensor)]
            shared = {_key(each) for each in tensors if self._arguments.get(id(each)) is each}
            self._arguments.update((id(each), each) for each in tensors)
            this = _Call(self, None if self._latest is None else self._latest())

            def pack(tensor: Tensor) -> Any:
                moves = tensor.nbytes >= SMALLEST and tensor.device.type == self._device.type and _is_dense(tensor)
                return _Stored(this, tensor) if moves and _key(tensor) not in shared else tensor

            with saved_tensors_hooks(pack, _unpack):  # inside of the block, the hooks of checkpointing come first
                return checkpoint(function, *arguments, **options)

        return call

    def settle(self, keep: _Call | None = None) -> None:
        """Wait for all copies to the host: the inputs of blocks, except for those of ``keep``, leave the device."""
        for stored in self._leaving:
            self.copies.wait(stored.event)
            stored.has_left(keep=stored.call is keep)
        self._leaving.clear()

    def _begin(self) -> None:
        self._join()
        self._latest, self._ends_backward = None, False

    def _join(self) -> None:
        """Wait for all copies; events are of no use after a pass that failed while it was recorded."""
        if self._leaving or self._arriving:
            self.copies.join()
        for stored in self._leaving:
            stored.has_left()
        self._leaving.clear()
        self._arriving.clear()

    def take(self, size: int) -> Tensor:
        """Return host memory for a tensor; `give_back` it."""
        if free := self._free.get(size):
            return free.pop()
        memory = host_memory(size, "the inputs of blocks", 'set offload_activations = "off"')
        weakref.finalize(self, lock_pages(memory, self._device))
        self.host_bytes += size
        return memory

    def give_back(self, memory: Tensor) -> None:
        """Let another tensor use this memory: copies run in the order in which they are started."""
        self._free.setdefault(memory.numel(), []).append(memory)

    def leaves(self, stored: _Stored) -> None:
        """Note a copy to the host that has been started."""
        self._leaving.append(stored)
        self._latest = weakref.ref(stored.call)

    def arrives(self, tensor: Tensor) -> None:
        """Hold memory that a copy writes to until the work has waited for it, also if nobody asks for it."""
        self._arriving.append(tensor)

    def arrived(self, tensor: Tensor) -> None:
        """Note that the work has waited for a copy to the device."""
        self._arriving = [each for each in self._arriving if each is not tensor]

    def end_with_backward(self) -> None:
        """Join all copies when the backward pass ends."""
        if not self._ends_backward:
            self._ends_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._ends_backward = False
        self.copies.join()
        self._arriving.clear()


class _Call:
    """The inputs of one block; ``previous``: those of the block before."""

    def __init__(self, owner: HostActivations, previous: _Call | None) -> None:
        self.owner = owner
        self._previous = None if previous is None else weakref.ref(previous)
        self._stored: list[weakref.ref[_Stored]] = []

    def add(self, stored: _Stored) -> None:
        self._stored.append(weakref.ref(stored))

    def fetch(self) -> None:
        """Start to copy all inputs to the device."""
        for each in self._stored:
            if (stored := each()) is not None:
                stored.fetch()

    @property
    def previous(self) -> _Call | None:
        return None if self._previous is None else self._previous()


class _Stored:
    """An input in host memory. ``event``: the end of its last copy."""

    def __init__(self, call: _Call, tensor: Tensor) -> None:
        self.call, self._copies = call, call.owner.copies
        self._layout = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._memory = call.owner.take(tensor.nbytes)
        self._there: Tensor | None = tensor.detach()  # on the device, until it is used or has left
        self.event = self._copies.send(self._host, self._there, self._copies.mark())
        self._leaves = True
        call.add(self)
        call.owner.leaves(self)

    def __del__(self) -> None:
        if hasattr(self, "_memory"):
            self.call.owner.give_back(self._memory)

    @property
    def _host(self) -> Tensor:
        return self._memory.view(self._dtype).as_strided(*self._layout)

    def has_left(self, *, keep: bool = False) -> None:
        """Note that the work has waited for the copy to the host."""
        self._leaves = False
        self._there = self._there if keep else None

    def fetch(self) -> None:
        """Start the copy to the device, unless it is there."""
        if self._there is None:
            self._there = torch.empty_strided(*self._layout, dtype=self._dtype, device=self._device)
            self.call.owner.arrives(self._there)
            self.event = self._copies.send(self._there, self._host, self._copies.mark())

    def brought(self) -> Tensor:
        """Return it on the device, and start to copy the inputs of the block before."""
        owner = self.call.owner
        owner.end_with_backward()
        owner.settle(keep=self.call)
        if self._there is None:
            self.call.fetch()
        there, self._there = self._there, None
        assert there is not None
        self._copies.wait(self.event)
        owner.arrived(there)
        if (previous := self.call.previous) is not None:
            previous.fetch()
        return there


def _unpack(packed: Any) -> Tensor:
    return packed.brought() if isinstance(packed, _Stored) else packed


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
