"""The networks of a model, by component, and the index of anything that has named tensors.

a module                         {"unet": module}
{"unet": .., "te1": ..}          unchanged
a diffusers pipeline, or its     unet or transformer -> "unet", text_encoder -> "te1", text_encoder_2 -> "te2",
`components`                     text_encoder_3 -> "te3"; others take no adapters

Wrapper modules (`inweave.ops.kinds.wrappers`) are looked through.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from inweave.adapter.components import COMPONENTS, FOLDERS
from inweave.errors import ConfigError
from inweave.exchange.load import open_base
from inweave.ops.kinds.wrappers import named_modules, unwrapped
from inweave.targets.index import ModelIndex, component_from_names, index_from_names
from inweave.weights.source import WeightSource


def networks_of(model: object) -> dict[str, nn.Module]:
    """Return component -> network of a module, a mapping of modules, or a diffusers pipeline; each has weights."""
    networks = {name: unwrapped(network) for name, network in _networks(model).items()}
    for name, network in networks.items():
        if not floating_state(network):
            raise ConfigError(
                f"{name}: {type(network).__name__} has no floating-point weights that an adapter could change"
            )
    return networks


def _networks(model: object) -> Mapping[str, nn.Module]:
    if isinstance(model, nn.Module):
        return {"unet": model}
    parts = model if isinstance(model, Mapping) else getattr(model, "components", None)
    if not isinstance(parts, Mapping):
        raise ConfigError(
            "expected a torch module, a mapping of component to module, or a diffusers pipeline, "
            f"got {type(model).__name__}"
        )
    if parts is model and not any(name in FOLDERS and name not in COMPONENTS for name in parts):
        wrong = [f"{name!r}: {type(part).__name__}" for name, part in parts.items() if not isinstance(part, nn.Module)]
        if not wrong:
            return parts
        if not any(isinstance(parts.get(name), nn.Module) for name in FOLDERS):
            raise ConfigError(f"a mapping of networks holds torch modules by component, got {', '.join(wrong)[:300]}")
    networks: dict[str, nn.Module] = {}
    for folder, component in FOLDERS.items():
        part = parts.get(folder)
        if isinstance(part, nn.Module) and component not in networks:
            networks[component] = part
    if not networks:
        raise ConfigError(
            f"{type(model).__name__}: none of its components takes adapters; "
            f"expected one of {', '.join(FOLDERS)}, got {', '.join(map(str, parts))[:300] or 'none'}"
        )
    return networks


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
    return ModelIndex(
        {
            name: component_from_names(name, {key: tuple(t.shape) for key, t in floating_state(network).items()})
            for name, network in networks.items()
        }
    )


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
