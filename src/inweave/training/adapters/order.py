"""The memory order of trained factors: those of layers with the same input are contiguous, by role.

    down of q, down of k, down of v, up of q, up of k, up of v        one block's attention
    all down of cross attention's k and v, then all their up          one width of a UNet: all of them read the text

This allows one product for several layers (`inweave.layers.siblings`). The order depends only on names and shapes, so
it is the same on every device, whether or not joint products are used.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from torch import nn

from inweave.models.roles import PROJECTIONS

_CROSS_ATTENTION, _OF_TEXT = "attn2", frozenset({"to_k", "to_v"})


def side_by_side(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters, named `<component>.<module>.<factor>`, in memory order."""
    modules: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        module, _, role = name.rpartition(".")
        modules.setdefault(module, {})[role] = parameter
    groups: dict[Hashable, list[str]] = {}
    for module, factors in modules.items():
        shapes = tuple((role, parameter.shape) for role, parameter in factors.items())
        groups.setdefault(_group(module, shapes), []).append(module)
    for key, members in groups.items():
        if isinstance(key, _Attention):
            members.sort(key=lambda module: key.names.index(module.rpartition(".")[2]))
    return {
        f"{module}.{role}": modules[module][role]
        for members in groups.values()
        for role in dict.fromkeys(role for module in members for role in modules[module])
        for module in members
        if role in modules[module]
    }


class _Attention(NamedTuple):
    """The key of an attention's group; its projections are ordered as in ``names``, not as in the model."""

    parent: str
    names: tuple[str, ...]
    shapes: Hashable


def _group(module: str, shapes: Hashable) -> Hashable:
    parent, _, leaf = module.rpartition(".")
    component, _, path = parent.partition(".")
    if path.rpartition(".")[2] == _CROSS_ATTENTION and leaf in _OF_TEXT:
        return component, shapes
    return next((_Attention(parent, names, shapes) for names in PROJECTIONS if leaf in names), module)
