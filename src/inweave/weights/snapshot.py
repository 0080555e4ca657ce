"""Detect whether parts of a model were replaced or moved: compared for every stack, so without a loop in Python.

    members    the dictionaries of modules that hold parameters, buffers and children
    entries    (dictionary, name, what it held)
    tensors    and their addresses

Whatever is replaced in a module is replaced in one of its dictionaries; what is moved in place has another address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import getitem, is_
from typing import Any

import torch

Entry = tuple[Mapping[str, object], str, object]


class Snapshot:
    """The present members of some modules."""

    def __init__(self, entries: Iterable[Entry], tensors: Sequence[torch.Tensor]) -> None:
        rows = list(entries)
        self._members = list({id(holder): holder for holder, _, _ in rows}.values())
        self._sizes = list(map(len, self._members))
        self._entries: tuple[list[Any], ...] = tuple(map(list, zip(*rows, strict=True))) if rows else ([], [], [])
        self._tensors = list(tensors)
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def part(self, entries: Iterable[Entry], tensors: Sequence[torch.Tensor]) -> Snapshot:
        """Return what some of the same modules held when this snapshot was made."""
        sizes = {id(holder): size for holder, size in zip(self._members, self._sizes, strict=True)}
        addresses = {id(tensor): address for tensor, address in zip(self._tensors, self._addresses, strict=True)}
        part = Snapshot(entries, tensors)
        part._sizes = [
            sizes.get(id(holder), -1) for holder in part._members
        ]  # a module that was empty then never matches
        part._addresses = [addresses[id(tensor)] for tensor in part._tensors]
        return part

    def holds(self) -> bool:
        """Return whether nothing was added, removed, replaced or moved."""
        if list(map(len, self._members)) != self._sizes:
            return False
        holders, names, values = self._entries
        try:
            same = all(map(is_, map(getitem, holders, names), values))
        except KeyError:
            return False
        return same and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
