"""Quantized layers in a live model: their tensors as one piece of memory, and changes that are quantized again.

    W' = Q(D(q) + changes)                          D: dequantized in float32; Q: quantized, with new scales
    lost = |W' - (D(q) + changes)| / |changes|      the share that did not survive rounding

Where more is lost than allowed, or Q does not exist, the weight keeps its bits (`beside`).
`packed_memory` makes the tensors of a layer views of one buffer of bytes, so that originals are kept, compared and
restored as those of any other weight. D and Q depend on nothing else, so a stack has the bits of a fresh build.
"""

from __future__ import annotations

import torch
from torch import nn

from inweave.ops.quantized import QuantizedLayer, QuantizedWeight, has_encoder, requantized
from inweave.weights.scratch import trim_heap
from inweave.weights.streaming.arena import ALIGNMENT, owns


def quantized_layer(module: nn.Module) -> QuantizedLayer | None:
    """Return the quantized layer that a module is, or carries adapters of; None for any other."""
    layer = module.__dict__.get("base", module)
    return layer if isinstance(layer, QuantizedLayer) else None


@torch.no_grad()
def packed_memory(layer: QuantizedLayer) -> torch.Tensor:
    """Return the bytes that the tensors of a layer are views of; they are moved there unless they are already.

    Those of a streamed block are in the memory of the block, where they stay.
    """
    tensors = list(layer.quantized)
    size, offsets = _layout(tensors)
    storage = tensors[0].untyped_storage()
    places = [(t.untyped_storage().data_ptr(), t.storage_offset() * t.itemsize) for t in tensors]
    start = places[0][1] if owns(storage) else 0
    whole = storage.nbytes() == size or owns(storage)
    if whole and places == [(storage.data_ptr(), start + at) for at in offsets]:
        return torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage, start, (size,), (1,))
    memory = torch.zeros(size, dtype=torch.uint8, device=tensors[0].device)
    views = weight_in(layer, memory)
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    layer.put(views)
    trim_heap(size)
    return memory


def weight_in(layer: QuantizedLayer, memory: torch.Tensor) -> QuantizedWeight:
    """Return a weight of the layer's format and shape as views of such bytes."""
    tensors = list(layer.quantized)
    _, offsets = _layout(tensors)
    views = (memory[at : at + t.nbytes].view(t.dtype).view(t.shape) for t, at in zip(tensors, offsets, strict=True))
    weight: QuantizedWeight = layer.weights(*views)
    return weight


def write_weight(layer: QuantizedLayer, memory: torch.Tensor, weight: QuantizedWeight) -> None:
    """Write a weight of the layer's format and shape to such bytes; its tensors may be views of them."""
    place = memory.untyped_storage().data_ptr()
    tensors = [each.clone() if each.untyped_storage().data_ptr() == place else each for each in weight]
    memory.zero_()  # between the tensors too
    for view, tensor in zip(weight_in(layer, memory), tensors, strict=True):
        view.copy_(tensor)


def encoded(layer: QuantizedLayer, total: torch.Tensor) -> QuantizedWeight | None:
    """Return a sum as a weight in the layer's layout, which may share its tables; None if it has no encoder."""
    return requantized(layer.quantized, total.flatten(1), "weight") if has_encoder(layer.quantized) else None


def lost_share(weight: QuantizedWeight, total: torch.Tensor, before: torch.Tensor) -> float:
    """Return the share of a change that did not survive rounding."""
    change = (total - before).norm()
    rest = weight.dequantized(torch.float32).view(total.shape) - total
    return float(rest.norm() / change) if change > 0 else 0.0


def _layout(tensors: list[torch.Tensor]) -> tuple[int, list[int]]:
    """Return the bytes of all tensors, and where each begins."""
    offsets, end = list[int](), 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return end, offsets
