"""Low-rank changes computed beside a quantized weight, which keeps its bits: for what requantizing would lose.

    y = layer(x) + (x down^T) up^T        up = [s1 c1 up1 | s2 c2 up2 | ...]    down = [down1; down2; ...]

s: strengths, c: scales; a change of some rows has zeros elsewhere. A convolution applies `down` with its own kernel,
stride, padding and dilation, and `up` as 1x1. The factors are float32, and rounded once to the dtype of the inputs.
They are a forward hook of the layer, so that operations that read its weight themselves notice it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from inweave.adapter import Lora
from inweave.ops.quantized import QuantizedLayer
from inweave.ops.tensors.decode import decode
from inweave.weights.stack import Item

_HANDLE = "_inweave_beside"


class LowRank:
    """A forward hook that adds such a change to a layer's output."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor) -> None:
        self._factors = {(down.device, down.dtype): (down, up)}

    @property
    def rank(self) -> int:
        """The rank of all changes together."""
        return len(next(iter(self._factors.values()))[0])

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = inputs[0]
        key = x.device, x.dtype
        if key not in self._factors:
            down, up = next(iter(self._factors.values()))
            self._factors[key] = down.to(*key), up.to(*key)
        down, up = self._factors[key]
        if isinstance(layer, nn.Conv2d):
            hidden = functional.conv2d(x, down, None, layer.stride, layer.padding, layer.dilation)
            added = functional.conv2d(hidden, up.view(*up.shape, 1, 1))
        else:
            added = functional.linear(functional.linear(x, down), up)
        return output + added.to(output.dtype)


@torch.no_grad()
def put_beside(layer: QuantizedLayer, items: Sequence[Item]) -> LowRank:
    """Let a layer compute plain products of two factors beside its weight, in place of earlier ones."""
    take_away(layer)
    device, downs, ups = layer.quantized[0].device, list[torch.Tensor](), list[torch.Tensor]()
    for item in items:
        placement, factors = item.placement, item.placement.factors
        assert isinstance(factors, Lora)
        up, down = (decode(each, dtype=torch.float32, device=device) for each in (factors.up, factors.down))
        if placement.source is not None:
            up = up[placement.source[0] : sum(placement.source)]
        rows = placement.rows()
        whole = up.new_zeros(layer.shape[0], down.shape[0])
        whole[rows.start : rows.stop] = up.flatten(1) * (factors.scale * item.strength)
        ups.append(whole)
        downs.append(down.reshape(down.shape[0], *layer.shape[1:]))
    hook = LowRank(torch.cat(downs), torch.cat(ups, 1))
    layer.__dict__[_HANDLE] = layer.register_forward_hook(hook)
    return hook


def take_away(layer: QuantizedLayer) -> None:
    """Remove what a layer computes beside its weight."""
    handle = layer.__dict__.pop(_HANDLE, None)
    if handle is not None:
        handle.remove()
