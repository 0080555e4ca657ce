"""Batches on the device: at fixed addresses, so that graphs can read them, and split to fit into memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from inweave.models.families.base import Tensors


class StaticInputs:
    """Batches on the device at fixed addresses, one set of buffers per shape."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[object, ...], Tensors] = {}

    def stage(self, batch: Tensors) -> Tensors:
        """Copy a batch into its buffers and return them."""
        key = shapes_of(batch)
        if key not in self._buffers:
            self._buffers[key] = {name: value.to(self._device, copy=True) for name, value in batch.items()}
            return self._buffers[key]
        for name, value in batch.items():
            # a copy from pageable memory makes the host wait for all earlier work on the device
            pinned = value.pin_memory() if self._device.type == "cuda" and not value.is_cuda else value
            self._buffers[key][name].copy_(pinned, non_blocking=True)
        return self._buffers[key]

    def clear(self) -> None:
        self._buffers.clear()


def shapes_of(batch: Tensors) -> tuple[object, ...]:
    """Return the key of the buffers, and of the graph, that a batch uses."""
    return tuple((name, tuple(value.shape), value.dtype) for name, value in batch.items())


def row_count(batch: Tensors) -> int:
    return len(next(iter(batch.values())))


def split_batch(
    batch: Tensors, parts: int, weigh: Callable[[Tensors], float] = row_count
) -> list[tuple[Tensors, float]]:
    """Split a batch along its first axis; return each part with its fraction of the batch's weight."""
    if parts == 1:
        return [(batch, 1.0)]
    chunks = {name: value.chunk(parts) for name, value in batch.items()}
    split = [{name: rows[i] for name, rows in chunks.items()} for i in range(len(next(iter(chunks.values()))))]
    return [(part, weigh(part) / weigh(batch)) for part in split]
