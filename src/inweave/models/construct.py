"""A network of a blueprint on the meta device: its class, from the libraries or a family's package, without weights."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

from inweave.models.blueprint import NetworkBlueprint
from inweave.models.configuration import bounded, diffusers_config, library_errors, transformers_config
from inweave.models.families import network_classes
from inweave.models.families.base import Network
from inweave.models.lazy_imports import defer_imports


def on_meta(part: NetworkBlueprint) -> nn.Module:
    """Build a network on the meta device, without weights."""
    declared = (
        Network(part.folder, part.class_name, part.library) if part.library else network_classes()[part.class_name]
    )
    label = f"{part.folder}: its configuration cannot be used for a {part.class_name}"
    with torch.device("meta"), bounded(part.folder, len(part.source.names())), library_errors(label), defer_imports():
        library = import_module(declared.library)
        kind = getattr(library, part.class_name)
        if hasattr(kind, "config_class"):  # a model of transformers
            config = transformers_config(part.folder, kind.config_class, part.config)
            if declared.text_model:
                kind = getattr(library, declared.text_model)
                config = config if isinstance(config, kind.config_class) else config.get_text_config()
            network = kind(config)
        else:
            network = kind.from_config(diffusers_config(part.folder, kind, part.config))
    assert isinstance(network, nn.Module)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.num_batches_tracked = None  # a count of steps of its training, which not every file has
    return network
