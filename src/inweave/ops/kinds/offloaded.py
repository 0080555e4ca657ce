"""Weights that offloading keeps elsewhere between forward passes, as hooks of other libraries record it.

accelerate   `_hf_hook`: the module holds meta tensors, and the hook's `weights_map` the numbers, in memory or on disk
diffusers    `_diffusers_hook`: groups of tensors whose data is replaced for each forward pass of one of their modules
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from inweave.ops.kinds.wrappers import unwrapped

ON_DISK = "offloaded to disk by accelerate, where it cannot be changed; offload it to the CPU"


def weight_maps(module: nn.Module, name: str) -> Iterator[tuple[Mapping[str, torch.Tensor], str]]:
    """Yield the mappings in which accelerate's hooks of a module keep the weight ``name`` below it, and its key."""
    hook = getattr(unwrapped(module), "_hf_hook", None)
    for each in (hook, *getattr(hook, "hooks", ())):
        weights, key = getattr(each, "weights_map", None), name
        while isinstance(inner := getattr(weights, "dataset", None), Mapping):
            weights, key = inner, f"{getattr(weights, 'prefix', '')}{key}"
        if isinstance(weights, Mapping) and key in weights:
            yield weights, key


def in_memory(weights: Mapping[str, torch.Tensor], key: str) -> torch.Tensor | None:
    """Return the tensor that a hook loads for each forward pass, if it is in memory, where it can be written."""
    memory = weights if isinstance(weights, dict) else getattr(weights, "state_dict", {})
    stored = memory.get(key)
    return stored if isinstance(stored, torch.Tensor) and not stored.is_meta else None


def numbers(module: nn.Module, leaf: str) -> torch.Tensor | None:
    """Return a parameter of a module with its numbers, wherever a hook of this module keeps them, or None."""
    parameter = module._parameters[leaf]
    if parameter is None or not parameter.is_meta:
        return parameter
    return next((weights[key] for weights, key in weight_maps(module, leaf)), None)


def execution_device(module: nn.Module) -> torch.device | None:
    """Return the device to which accelerate's hooks of a module load its weights, or None without such a hook."""
    hook = getattr(unwrapped(module), "_hf_hook", None)
    for each in (hook, *getattr(hook, "hooks", ())):
        if (device := getattr(each, "execution_device", None)) is not None:
            return torch.device(device)
    return None


def is_hooked(module: nn.Module) -> bool:
    """Return whether offloading replaced this module's forward, so that it loads the module's weights."""
    return "_old_forward" in module.__dict__ or any(_groups(module))


def offload_groups(network: nn.Module) -> dict[int, object]:
    """Return {id of a tensor: the group in which diffusers' group offloading put it}."""
    groups: dict[int, object] = {}
    for module in network.modules():
        for group in _groups(module):
            for member in (*getattr(group, "modules", ()), *getattr(group, "parameters", ())):
                tensors = member.parameters() if isinstance(member, nn.Module) else [member]
                groups |= {id(tensor): group for tensor in tensors}
    return groups


def _groups(module: nn.Module) -> Iterator[object]:
    hooks: Mapping[str, object] = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    return (group for hook in hooks.values() if (group := getattr(hook, "group", None)) is not None)


def elsewhere(group: object, tensor: torch.Tensor) -> str | None:
    """Return why a write would be lost, if group offloading has the weight in another place at present."""
    if getattr(group, "offload_to_disk_path", None) is not None:
        return "offloaded to disk by diffusers, where it cannot be read or changed; offload it to memory instead"
    stored = getattr(group, "cpu_param_dict", {}).get(tensor)
    if stored is not None and stored.data_ptr() != tensor.data_ptr():
        return "on the device temporarily by diffusers' group offloading; do this between two forward passes"
    return None
