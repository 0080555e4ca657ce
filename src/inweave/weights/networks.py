"""The networks of a model, by component, and the index of anything that has named tensors.

What is taken for a component: `inweave.ops.kinds.pipelines`.
Wrapper modules (`inweave.ops.kinds.wrappers`) are looked through.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.exchange.load import open_base
from inweave.ops.kinds.pipelines import components_of
from inweave.ops.kinds.wrappers import named_modules, unwrapped
from inweave.ops.quantized import QuantizedLayer
from inweave.targets.index import ModelIndex, component_from_names, index_from_names
from inweave.weights.orientation import known_layouts
from inweave.weights.quantized import quantized_layer
from inweave.weights.source import WeightSource


def networks_of(model: object) -> dict[str, nn.Module]:
    """Return component -> network of a module, a mapping of modules, or a diffusers pipeline; each has weights."""
    networks = {name: unwrapped(network) for name, network in components_of(model).items()}
    if isinstance(model, nn.Module):
        networks = {_component(network): network for network in networks.values()}
    for name, network in networks.items():
        if not floating_state(network) and not quantized_layers(network):
            raise ConfigError(
                f"{name}: {type(network).__name__} has no floating-point weights that an adapter could change"
            )
    return networks


def _component(network: nn.Module) -> str:
    """Return the component that a bare module is: "model" for one of transformers that is not part of a pipeline."""
    if all(kind.__name__ != "PreTrainedModel" for kind in type(network).__mro__):
        return "unet"
    only = index_from_names(weight_shapes(network))
    return "model" if set(only.components) == {"model"} else "unet"


def index_of(model: object) -> ModelIndex:
    """Return the index of a model, on which `resolve` places adapters.

    Args:
        model: A known base by name ("sdxl"), a path (a checkpoint, an index of shards or a model folder), a
            `WeightSource`, a torch module, a mapping of component to module, or a diffusers pipeline.

    Returns:
        The names and shapes of the model's tensors, by component.

    Raises:
        ConfigError: ``model`` is none of these, or has no weights that an adapter could change.
        FormatError: A file cannot be read.
    """
    if isinstance(model, ModelIndex):
        return model
    if isinstance(model, str | os.PathLike):
        return open_base(model)
    if isinstance(model, WeightSource):
        return index_from_names({name: model.spec(name).shape for name in model.names()})
    networks = networks_of(model)
    components = {
        name: replace(component_from_names(name, _adaptable_shapes(each)), layouts=known_layouts(each))
        for name, each in networks.items()
    }
    return ModelIndex(components, in_order=True)


def _adaptable_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    floating = floating_state(network)
    packed = {f"{path}.weight" if path else "weight" for path in quantized_layers(network)}
    return {name: shape for name, shape in weight_shapes(network).items() if name in floating or name in packed}


class Slot(NamedTuple):
    """One place of a network that holds a tensor: a parameter or a persistent buffer."""

    module: nn.Module
    leaf: str
    tensor: torch.Tensor


def slots(network: nn.Module) -> dict[str, Slot]:
    """Map the names of a state dict, without those of wrappers, to the places that hold the tensors."""
    places: dict[str, Slot] = {}
    for prefix, module in named_modules(network):
        dot = f"{prefix}." if prefix else ""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places[dot + leaf] = Slot(module, leaf, parameter)
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                places[dot + leaf] = Slot(module, leaf, buffer)
    return places


def floating_state(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return the floating-point tensors of a network's state dict, not detached."""
    return {name: slot.tensor for name, slot in slots(network).items() if slot.tensor.is_floating_point()}


def weight_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of a network's state dict, those of quantized layers as their weight."""
    shapes = {name: tuple(slot.tensor.shape) for name, slot in slots(network).items()}
    for path, layer in quantized_layers(network).items():
        for leaf in layer.weights._fields:
            shapes.pop(f"{path}.{leaf}" if path else leaf, None)
        shapes[f"{path}.weight" if path else "weight"] = layer.shape
    return shapes


def quantized_layers(network: nn.Module) -> dict[str, QuantizedLayer]:
    """Return the quantized layers of a network by name."""
    layers = ((name, quantized_layer(module)) for name, module in named_modules(network))
    return {name: layer for name, layer in layers if layer is not None}
