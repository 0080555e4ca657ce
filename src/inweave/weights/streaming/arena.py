"""Frozen blocks in host memory: the bytes of all tensors of a block are one piece of memory, copied as a whole.

    network ──regions──► block 0 | block 1 | ... | the rest         every tensor is in one of them
    block   = | tensor | tensor, its views | ... |                  each part at a multiple of 256 bytes

Tensors that share bytes stay together, with their strides: views of one matrix (queries, keys and values) are views of
one matrix again. Bytes that two blocks share, or that are also read outside of blocks, belong to the rest.

Between two parts there are zeros, so that a quantized layer whose tensors lie one after the other in 256-byte steps
(`inweave.weights.quantized`) is one run of bytes in here too, and `owns` says that such bytes are nobody else's.

`BlockMemory.point` makes the tensors of a block views of other memory: of its place in host memory, or of a slot. They
remain the same objects, and autograd does not see it: their version counters do not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from inweave.errors import MemoryBudgetError
from inweave.weights.scratch import host_buffer

ALIGNMENT = 256  # of each part, for kernels that read many bytes at once
_GRAIN = 64  # parts begin at a multiple of this in their old memory, so that every dtype stays aligned
REST = -1
#: address of a storage -> the memory in it that tensors were gathered in, while a `BlockMemory` holds it
_gathered: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


class _Part(NamedTuple):
    """Bytes of a storage, and the tensors that are views of them."""

    storage: torch.UntypedStorage
    start: int
    end: int
    tensors: list[torch.Tensor]


class BlockMemory:
    """The frozen tensors of one block, or of the rest of a network, as one piece of bytes.

    ``size``: of the piece; ``memory``: where `gather` has put it.
    """

    def __init__(self, parts: Iterable[_Part]) -> None:
        self._views: list[tuple[torch.Tensor, int]] = []  # and where each begins
        self._parts: list[tuple[_Part, int]] = []
        self.memory: torch.Tensor | None = None
        end = 0
        for part in parts:
            self._parts.append((part, end))
            self._views += [(tensor, end + _offset(tensor) - part.start) for tensor in part.tensors]
            end += -(-(part.end - part.start) // ALIGNMENT) * ALIGNMENT
        self.size = end

    @property
    def host(self) -> torch.Tensor:
        """Where `gather` has put the bytes."""
        assert self.memory is not None
        return self.memory

    @torch.no_grad()
    def gather(self, memory: torch.Tensor) -> None:
        """Copy all bytes to ``memory``, and make the tensors views of it; their old memory is free then."""
        for part, at in self._parts:
            count = part.end - part.start
            old = torch.empty(0, dtype=torch.uint8, device=part.storage.device)
            memory[at : at + count].copy_(old.set_(part.storage, part.start, (count,), (1,)))
            memory[at + count : at + -(-count // ALIGNMENT) * ALIGNMENT].zero_()
        self.point(memory)
        start = int(memory.storage_offset())
        self._parts = [(_Part(memory.untyped_storage(), start, start + self.size, []), 0)]
        self.memory = memory
        if self.size:
            _gathered[memory.untyped_storage().data_ptr()] = memory

    @torch.no_grad()
    def point(self, memory: torch.Tensor) -> None:
        """Make the tensors views of ``memory``, which holds, or will hold, the block's bytes."""
        storage, origin = memory.untyped_storage(), memory.storage_offset()
        for tensor, at in self._views:
            view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
            tensor.data = view.set_(storage, (origin + at) // tensor.itemsize, tensor.shape, tensor.stride())


def divide(
    network: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    fixed: Collection[torch.Tensor] = (),
    aliases: Iterable[torch.Tensor] = (),
) -> tuple[list[BlockMemory], BlockMemory]:
    """Return the memory of each block, and that of the rest of a network.

    Args:
        network: On the host.
        blocks: Its blocks; none may contain another.
        fixed: Tensors that are left where they are, in addition to those that require a gradient.
        aliases: Tensors that belong to no module and are views of the network's.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [module for module in network.modules() if id(module) not in inside]
    places: dict[int, tuple[torch.Tensor, set[int]]] = {}
    for number, modules in (*enumerate(block.modules() for block in blocks), (REST, outside)):
        for tensor in _tensors(modules):
            places.setdefault(id(tensor), (tensor, set()))[1].add(number)
    left = {id(tensor) for tensor in fixed}
    owners = [
        (numbers.pop() if len(numbers) == 1 else REST, tensor)
        for key, (tensor, numbers) in places.items()
        if key not in left
    ]
    divided: dict[int, list[_Part]] = {}
    for number, part in _parts(owners, [*aliases]):
        divided.setdefault(number, []).append(part)
    return [BlockMemory(divided.get(number, ())) for number in range(len(blocks))], BlockMemory(divided.get(REST, ()))


def owns(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage holds gathered tensors, and zeros from the end of each to a multiple of 256 bytes."""
    return storage.data_ptr() in _gathered


def host_memory(size: int, what: str, advice: str = 'quantize the base, or set offload = "off"') -> torch.Tensor:
    """Return bytes of host memory in a map of its own.

    Raises:
        MemoryBudgetError: the host has too little; ``what`` names the use, ``advice`` what to do.
    """
    try:
        return host_buffer(size)
    except (OSError, MemoryError, RuntimeError) as error:
        raise MemoryBudgetError(
            f"not enough host memory for {what} ({size / 2**30:.2f} GiB: {error}); {advice}"
        ) from None


def _tensors(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the frozen tensors that these modules hold themselves."""
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not tensor.requires_grad and not tensor.is_meta:
                yield tensor


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = _offset(tensor)
    return start, start + ((last + 1) * tensor.itemsize if tensor.numel() else 0)


def _parts(owners: Sequence[tuple[int, torch.Tensor]], aliases: Sequence[torch.Tensor]) -> Iterator[tuple[int, _Part]]:
    """Yield runs of bytes that tensors share, with the number of the block that owns all of them, or `REST`."""
    storages: dict[int, list[tuple[int, int, int | None, torch.Tensor]]] = {}
    for number, tensor in (*owners, *((None, alias) for alias in aliases)):
        storages.setdefault(tensor.untyped_storage()._cdata, []).append((*_extent(tensor), number, tensor))
    for entries in storages.values():
        if all(number is None for _, _, number, _ in entries):
            continue  # an alias of nothing
        entries.sort(key=lambda entry: entry[:2])
        group: list[tuple[int, int, int | None, torch.Tensor]] = []
        end = -1
        for entry in (*entries, None):
            if group and (entry is None or entry[0] >= end):
                numbers = {number for _, _, number, _ in group if number is not None}
                start = group[0][0] // _GRAIN * _GRAIN
                part = _Part(group[0][3].untyped_storage(), start, end, [tensor for *_, tensor in group])
                yield numbers.pop() if len(numbers) == 1 else REST, part
                group, end = [], -1
            if entry is not None:
                group.append(entry)
                end = max(end, entry[1])
