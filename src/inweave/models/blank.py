"""A model without weights, on the meta device: for sizes, names, and the memory of its work."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inweave.models.blueprint import Blueprint
from inweave.models.construct import on_meta
from inweave.models.model import Model
from inweave.models.naming import under_names_of
from inweave.weights.hold import hold_weights

_META = torch.device("meta")


def blank(blueprint: Blueprint, dtype: torch.dtype, *, quantized: bool = False) -> Model:
    """Return the model in a precision without weights; its weight files are not read.

    ``quantized``: what its files store quantized stays so.
    """
    networks: dict[str, nn.Module] = {}
    for folder, part in blueprint.parts.items():
        wide = folder == "vae" and part.config.get("force_upcast")
        network = _cast(on_meta(part), torch.float32 if wide else dtype).eval().requires_grad_(False)
        if quantized:
            hold_weights(network, under_names_of(network, part.source), _META)
        networks[folder] = network
    return Model(blueprint, networks, {}, None, _META, dtype)


def _cast(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert without diffusers' warnings about `.to(dtype)`."""
    cast: Any = network._apply
    converted: nn.Module = cast(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return converted
