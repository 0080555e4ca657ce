"""Layers of a model that take their weights quantized from a source, before everything else is read.

Linear layers and convolutions whose weight the source stores quantized hold it like that (`held`). What else is
quantized in the file is unpacked while it is read: embeddings, tied weights, convolutions with groups, the projections
that MultiheadAttention reads itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import nn

from inweave.ops.kinds.wrappers import named_modules
from inweave.ops.quantized import QuantizedLayer, format_of, matrix_of
from inweave.weights.held import quantized_weight
from inweave.weights.networks import quantized_layers, slots
from inweave.weights.scratch import trim_heap
from inweave.weights.source import WeightSource

#: what happens to weights that a file stores quantized: "off" unpacks them to the model's dtype
Quantized = Literal["off", "keep"]


def hold_weights(
    model: nn.Module,
    source: WeightSource,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    progress: Callable[[str], object] | None = None,
) -> list[str]:
    """Give layers the weights that ``source`` stores quantized; return the names of these weights.

    Args:
        model: its tensors may be on the meta device.
        source: where the weights come from, under the model's names.
        device: where the weights go; on the meta device nothing is read.
        dtype: of the products; None: that of the layer's own weight.
        progress: called with each name.
    """
    names, places = source.names(), slots(model)
    owners = Counter(id(slot.tensor) for slot in places.values())
    read = {id(child) for m in model.modules() if isinstance(m, nn.MultiheadAttention) for child in m.children()}
    done: list[str] = []
    for name, (owner, leaf, tensor) in places.items():
        plain = leaf == "weight" and owners[id(tensor)] == 1 and id(owner) not in read
        if not plain or name not in names or not _takes(owner):
            continue
        if source.spec(name).shape != tuple(tensor.shape):
            continue  # `build` reports it
        weight = quantized_weight(source, name, device)
        if weight is not None:
            format_of(weight.format()).layer_for(owner).hold(owner, weight, dtype or tensor.dtype)
            done.append(name)
            trim_heap(weight[0].nbytes)
            if progress is not None:
                progress(name)
    return done


def _takes(module: nn.Module) -> bool:
    forward = nn.Linear.forward if isinstance(module, nn.Linear) else nn.Conv2d.forward
    return min(matrix_of(module)) > 0 and type(module).forward is forward


def stored_quantized(source: WeightSource) -> int:
    """Return how many weights a source stores quantized; nothing is read."""
    return sum(quantized_weight(source, name, "meta") is not None for name in source.names() if name.endswith("weight"))


def held_summary(networks: Mapping[str, nn.Module]) -> str:
    """Return how many weights are held quantized, and their bytes; "" if none is."""
    layers = [layer for network in networks.values() for layer in quantized_layers(network).values()]
    if not layers:
        return ""
    counts = ", ".join(f"{count} as {name}" for name, count in Counter(map(_label, layers)).most_common())
    every = sum(matrix_of(m) != (0, 0) for each in networks.values() for _, m in named_modules(each)) + len(layers)
    return (
        f"{len(layers)} of {every} weights of linear layers and convolutions stay quantized ({counts}): "
        f"{memory_summary(networks)}"
    )


def memory_summary(networks: Mapping[str, nn.Module]) -> str:
    """Return the bytes of quantized weights, of which there is at least one."""
    layers = [layer for network in networks.values() for layer in quantized_layers(network).values()]
    stored = sum(tensor.nbytes for layer in layers for tensor in layer.quantized)
    wide = sum(math.prod(layer.shape) * layer.dtype.itemsize for layer in layers)
    kind = str(layers[0].dtype).removeprefix("torch.")
    return f"{stored / 2**20:,.0f} MiB instead of {wide / 2**20:,.0f} in {kind}"


def _label(layer: QuantizedLayer) -> str:
    return layer.quantized.format()
