"""LoRA layers that share an input, computed as one product: queries, keys and values, or all projections of a text.

    [y_1 | y_2 | ...] = x W^T + b + s S up^T       W, b, down and up of all layers by rows       `inweave.ops.linear`

The layers keep their parameters and names: frozen weights become views of one matrix, so that nothing is stored twice,
and the factors are views of a training run's flat buffer, where they are contiguous
(`inweave.training.adapters.order`). The factors are set during a training step (`inweave.training.optim.rounding`);
without them every layer is computed separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar, cast

import torch
from torch import nn

from inweave.layers.branch import Branch
from inweave.layers.fused import is_plain_linear, is_plain_lora
from inweave.layers.layer import LoraLayer
from inweave.layers.lora import LoraBranch
from inweave.layers.qat import QuantizationAware
from inweave.ops.common.modules import is_unchanged
from inweave.ops.linear import Rounded, Weight, lora_linear
from inweave.ops.quantized import QuantizedLinear, joint_weight


class SiblingFactors(NamedTuple):
    """Factors of all layers, concatenated by rows: trained tensors, and their copies in the dtype of the inputs."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    rounded_down: Rounded
    rounded_up: Rounded


class Siblings:
    """Layers with the same input, width and rank; ``factors`` is set during a training step."""

    def __init__(self, layers: tuple[LoraLayer, ...], weight: Weight, bias: torch.Tensor | None) -> None:
        self.layers = layers
        self.weight, self.bias = weight, bias
        self.dtype = cast("torch.dtype", (weight if isinstance(weight, torch.Tensor) else layers[0].base).dtype)
        self.count = len(layers)
        self.factors: SiblingFactors | None = None

    @property
    def is_joint(self) -> bool:
        """Whether the layers are computed as one product at present."""
        return self.factors is not None

    def loras(self) -> tuple[list[LoraBranch], float] | None:
        """Return each layer's only LoRA and their common scale, or None if the layers cannot be computed together."""
        branches: list[Branch] = []
        scales = set()
        for at, layer in enumerate(self.layers):
            acting = layer.acting
            # training=True in either mode: the result is cached while these adapters act, and steps apply dropout
            if len(acting) != 1 or not is_plain_lora(acting[0][0], training=True):
                return None
            if not is_unchanged(layer) or not is_unchanged(layer.base):
                return None
            if not self._is_part(layer, at):
                return None  # quantized, moved or replaced since
            branches.append(acting[0][0])
            scales.add(acting[0][1] * acting[0][0].scale)
        return (cast("list[LoraBranch]", branches), scales.pop()) if len(scales) == 1 else None

    def _is_part(self, layer: LoraLayer, at: int) -> bool:
        """Return whether the layer's weight is still its part of the joint matrix."""
        whole = self.weight if isinstance(self.weight, torch.Tensor) else self.weight[0]
        base = layer.base
        own = base.quantized[0] if isinstance(base, QuantizedLinear) else layer._parameters.get("weight")
        part = whole[at * layer.out : (at + 1) * layer.out]
        return own is not None and own.data_ptr() == part.data_ptr() and own.dtype == part.dtype

    def outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Return the layers' outputs as columns of one matrix, or None if they cannot be computed together."""
        y = self.product(x)
        return None if y is None else y.unbind(-2)

    def product(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the outputs in one tensor (..., layers, columns), or None."""
        factors = self.factors
        if factors is None or x.dtype != self.dtype or torch.is_autocast_enabled(x.device.type):
            return None
        if not all(layer.acting for layer in self.layers):
            return None  # disabled within the step
        y = lora_linear(
            x, self.weight, self.bias, factors.down, factors.up, factors.scale,
            rounded_down=factors.rounded_down, rounded_up=factors.rounded_up,
        )  # fmt: skip
        return y.view(*x.shape[:-1], self.count, y.shape[-1] // self.count)


class SharedOutputs:
    """A mixin for groups across a model that read the same tensor: its outputs are computed before the first layer is
    called.
    """

    # the input and its outputs: a single attribute, so that another thread sees both or neither
    _shared: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        raise NotImplementedError

    def share(self, x: torch.Tensor) -> None:
        """Compute all outputs for this tensor object."""
        outputs = self.outputs(x)
        self._shared = None if outputs is None else (x, outputs)

    def forget(self) -> None:
        """Drop the outputs."""
        self._shared = None

    def output(self, x: torch.Tensor, at: int) -> torch.Tensor | None:
        """Return the output of layer ``at`` for this tensor object, or None if there is none."""
        shared = self._shared
        return shared[1][at] if shared is not None and shared[0] is x else None


class SharedSiblings(Siblings, SharedOutputs):
    """Layers across a model that read the same tensor."""


S = TypeVar("S", bound=Siblings)


@torch.no_grad()
def stacked(kind: type[S], modules: Sequence[object]) -> S | None:
    """Return the joint product of these modules, or None unless they are plain frozen linear layers of one shape
    with adapters.
    """
    layers = tuple(module for module in modules if isinstance(module, LoraLayer))
    biases = [layer._parameters.get("bias") for layer in layers]
    if len(layers) < max(2, len(modules)) or not (alike(biases) or all(bias is None for bias in biases)):
        return None
    if any(isinstance(layer.operation, QuantizationAware) for layer in layers):
        return None  # each rounds its own sum
    weight: Weight | None = None
    if all(isinstance(layer.base, QuantizedLinear) for layer in layers):
        weight = joint_weight([layer.base for layer in layers])
    elif all(is_plain_linear(layer.base, layer.kind) for layer in layers):
        weights = [layer._parameters.get("weight") for layer in layers]
        weight = one_matrix(cast("list[nn.Parameter]", weights)) if alike(weights) else None
    if weight is None:
        return None
    bias = None if biases[0] is None else one_matrix(cast("list[nn.Parameter]", biases))
    return kind(layers, weight, bias)


def alike(parameters: Sequence[nn.Parameter | None]) -> bool:
    """Return whether these are distinct frozen parameters with the same shape, dtype and device."""
    kinds = {None if p is None else (type(p), p.shape, p.dtype, p.device, p.requires_grad) for p in parameters}
    first = parameters[0]
    return (
        len(kinds) == 1
        and first is not None
        and type(first) is nn.Parameter
        and not first.requires_grad
        and len({id(parameter) for parameter in parameters}) == len(parameters)
    )


def one_matrix(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Concatenate the parameters by rows and make them views of the result, one at a time to limit peak memory."""
    rows = parameters[0].shape[0]
    whole = parameters[0].new_empty(rows * len(parameters), *parameters[0].shape[1:])
    for part, parameter in zip(torch.split(whole, rows), parameters, strict=True):
        part.copy_(parameter)
        parameter.data = part
    return whole
