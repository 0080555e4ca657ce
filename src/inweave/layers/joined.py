"""Frozen linear layers that share an input, computed as one product: queries, keys and values without adapters.

    [y_1 | y_2 | ...] = x W^T + b                    W and b of all layers by rows

The layers keep their parameters and names: weights become views of one matrix, so that nothing is stored twice and
adapters are merged into it in place. A layer that was replaced, moved or given hooks is computed separately, and so are
the others of its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from inweave.layers.siblings import alike, one_matrix
from inweave.ops.common.modules import is_unchanged


class Member(NamedTuple):
    """A linear layer by the module that holds it."""

    owner: nn.Module
    name: str

    @property
    def layer(self) -> nn.Module | None:
        return self.owner._modules.get(self.name)


class JoinedLinear:
    """Layers with the same input and width."""

    is_joint = True

    def __init__(self, members: Sequence[Member], weight: Tensor, bias: Tensor | None) -> None:
        self._layers = [(member, member.layer) for member in members]
        self.weight, self.bias = weight, bias
        self.count = len(self._layers)
        self._rows = len(weight) // self.count

    def product(self, x: Tensor) -> Tensor | None:
        """Return the outputs in one tensor (..., layers, columns); None if the layers compute separately."""
        if x.dtype != self.weight.dtype or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return None
        if not all(self._is_part(number) for number in range(self.count)):
            return None
        y = functional.linear(x, self.weight, self.bias)
        return y.view(*x.shape[:-1], self.count, self._rows)

    def outputs(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """Return the layers' outputs as columns of one matrix, or None."""
        y = self.product(x)
        return None if y is None else y.unbind(-2)

    def _is_part(self, number: int) -> bool:
        """Return whether a layer is still its part of the joint matrix, and nothing else."""
        member, layer = self._layers[number]
        if member.layer is not layer or layer is None or not is_unchanged(layer):
            return False
        own, start = layer._parameters, number * self._rows
        weight, bias = own.get("weight"), own.get("bias")
        if weight is None or weight.data_ptr() != self.weight[start].data_ptr() or weight.dtype != self.weight.dtype:
            return False
        if self.bias is None or bias is None:
            return self.bias is None and bias is None
        return bias.data_ptr() == self.bias[start].data_ptr() and bias.dtype == self.bias.dtype


J = TypeVar("J", bound=JoinedLinear)


@torch.no_grad()
def joined(kind: type[J], members: Sequence[Member]) -> J | None:
    """Return the joint product of these layers; None unless they are plain frozen linear layers of one shape."""
    layers = [member.layer for member in members]
    if len(layers) < 2 or not all(type(layer) is nn.Linear and is_unchanged(layer) for layer in layers):
        return None
    weights, biases = (
        [layer._parameters[name] for layer in layers if layer is not None] for name in ("weight", "bias")
    )
    if not alike(weights) or not (alike(biases) or all(bias is None for bias in biases)):
        return None
    plain_weights, plain_biases = ([each for each in group if each is not None] for group in (weights, biases))
    return kind(members, one_matrix(plain_weights), one_matrix(plain_biases) if plain_biases else None)
