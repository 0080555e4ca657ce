"""Tensors that share memory: tied weights, as one parameter or as views, slices and transposes of one another.

the same bytes       [address, address + extent) of two tensors overlap, and so do some of their elements
on the meta device   there are no bytes: the same tensor
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)
_WORK = 10_000  # steps of numpy's search for a common element; views that need more count as overlapping


def overlaps(tensors: Mapping[Key, Tensor]) -> dict[Key, list[Key]]:
    """Return every key whose tensor shares memory with other tensors, with their keys."""
    spans: dict[object, list[tuple[int, int, int]]] = {}
    keys = list(tensors)
    for number, key in enumerate(keys):
        tensor = tensors[key]
        if tensor.is_meta:
            spans.setdefault(id(tensor), []).append((0, 1, number))
        elif (start := address(tensor)) and tensor.numel() and tensor.layout == torch.strided:
            spans.setdefault(tensor.device, []).append((start, start + _extent(tensor), number))
    shared: dict[Key, list[Key]] = {}
    for rows in spans.values():
        rows.sort()
        group, end = list[int](), 0
        for start, stop, number in [*rows, (end, end, -1)]:
            if number < 0 or start >= end:
                shared |= _meetings(group, keys, tensors)
                group, end = [], stop
            group.append(number)
            end = max(end, stop)
    return shared


def address(tensor: Tensor) -> int:
    """Return the address of a tensor; 0 if it has no memory of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass without storage
        return 0


def _meetings(group: list[int], keys: list[Key], tensors: Mapping[Key, Tensor]) -> dict[Key, list[Key]]:
    if len(group) < 2:
        return {}
    meetings: dict[Key, list[Key]] = {}
    every = sorted(group)
    for number in every:
        others = [keys[o] for o in every if o != number and _meet(tensors[keys[number]], tensors[keys[o]])]
        if others:
            meetings[keys[number]] = others
    return meetings


def _meet(one: Tensor, two: Tensor) -> bool:
    if one.is_meta or (one.is_contiguous() and two.is_contiguous()):
        return address(one) < address(two) + _extent(two) and address(two) < address(one) + _extent(one)
    try:
        return np.shares_memory(_addresses(one), _addresses(two), max_work=_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _addresses(tensor: Tensor) -> np.ndarray:
    """Return an array at the address of a tensor; its numbers are never read."""
    size = tensor.element_size()
    interface = {
        "version": 3,
        "typestr": f"|V{size}",
        "shape": tuple(tensor.shape),
        "data": (address(tensor), True),
        "strides": tuple(size * stride for stride in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _extent(tensor: Tensor) -> int:
    """Return the bytes from the first element to the end of the last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
