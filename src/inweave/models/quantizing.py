"""Quantizing a denoiser while it loads: each layer as soon as its weight is there, so that 16 bits are never all there.

    build --arrived--> Quantizer --group complete--> quantized, the original weight is freed

Queries, keys and values of one attention are quantized as one matrix once all three have arrived, as in
`inweave.models.quantization`: the bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inweave.models.quantization import quantized_names
from inweave.models.roles import projections
from inweave.ops.quantized import FORMATS, relative_error


class Quantizer:
    """Quantizes the layers of one network; ``device``: where to compute, ``store``: where quantized weights go."""

    def __init__(self, network: nn.Module, format: str, device: torch.device, store: torch.device) -> None:
        self._network, self._format, self._device, self._store = network, format, device, store
        chosen = quantized_names(network, format)
        ordered = [name for name, _ in network.named_modules() if name in chosen]
        self._groups = {name: group for group in projections(ordered) for name in group}
        self._here: set[str] = set()
        self._error, self._weights, self._layers = 0.0, 0, 0

    def arrived(self, name: str) -> None:
        """Quantize the group of a weight that is in place, if it was the last of them; other tensors are left."""
        module, _, leaf = name.rpartition(".")
        group = self._groups.get(module, ())
        if leaf != "weight" or not group:
            return
        self._here.add(module)
        if not self._here.issuperset(group):
            return
        layers: list[Any] = [self._network.get_submodule(each) for each in group]
        kind = FORMATS[self._format]
        alike = len({(layer.weight.shape, layer.weight.dtype) for layer in layers}) == 1
        for part in [layers] if alike else [[layer] for layer in layers]:
            original = part[0].weight.detach()
            kind.quantize(*part, device=self._device, store=self._store)
            stored = part[0].quantized
            self._error += relative_error(original.flatten(1).to(stored[0].device), stored)
            self._weights += 1
            self._layers += len(part)

    def note(self) -> str:
        """Return what was quantized, for the log."""
        work = (
            f"multiplied in 8 bits ({self._format})" if FORMATS[self._format].for_speed else f"stored in {self._format}"
        )
        mean = f"; their weights differ by {self._error / self._weights:.1%} on average" if self._weights else ""
        return f"{self._layers} layers are {work}, each since its weight was read{mean}"
