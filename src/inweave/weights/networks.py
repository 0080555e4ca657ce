"""The networks of a model, by component, and the index of anything that has named tensors.

a module                         {"unet": module}
{"unet": .., "te1": ..}          as it is
a diffusers pipeline             its `components`: unet or transformer -> "unet", text_encoder -> "te1",
                                 text_encoder_2 -> "te2", text_encoder_3 -> "te3"; others take no adapters
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import nn

from inweave.adapter.components import FOLDERS
from inweave.errors import ConfigError
from inweave.exchange.load import open_base
from inweave.targets.index import ModelIndex, component_from_names, index_from_names
from inweave.weights.source import WeightSource


def networks_of(model: object) -> dict[str, nn.Module]:
    """component -> network, of a module, a mapping of them, or a diffusers pipeline."""
    if isinstance(model, nn.Module):
        return {"unet": model}
    if isinstance(model, Mapping):
        wrong = [f"{name!r}: {type(part).__name__}" for name, part in model.items() if not isinstance(part, nn.Module)]
        if wrong:
            raise ConfigError(f"a mapping of networks holds torch modules by component, got {', '.join(wrong)}")
        return dict(model)
    parts = getattr(model, "components", None)
    if isinstance(parts, Mapping):
        networks: dict[str, nn.Module] = {}
        for folder, component in FOLDERS.items():
            part = parts.get(folder)
            if isinstance(part, nn.Module) and component not in networks:
                networks[component] = part
        if networks:
            return networks
        raise ConfigError(
            f"{type(model).__name__}: none of its components takes adapters; "
            f"expected one of {', '.join(FOLDERS)}, got {', '.join(map(str, parts)) or 'none'}"
        )
    raise ConfigError(
        "expected a torch module, a mapping of component to module, or a diffusers pipeline, "
        f"got {type(model).__name__}"
    )


def index_of(model: object) -> ModelIndex:
    """The index of a model: what `resolve` places adapters on.

    ``model``: a known base by name ("sdxl"), a path (a checkpoint, an index of shards or a model folder), a
    `WeightSource`, a torch module, a mapping of component to module, or a diffusers pipeline.
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


def floating_state(network: nn.Module) -> dict[str, nn.Parameter]:
    """The floating-point tensors of a network's state dict, not detached."""
    state: dict[str, nn.Parameter] = network.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
