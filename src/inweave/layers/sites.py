"""The sites of a model: every module once, with all its names and parents, and how to replace it.

A module used in several places is one site with several names: its weight exists once, so adapting it affects all of
them. A weight that two *different* modules hold (an embedding and the output head) is tied. Wrapper modules
(torch.compile, DDP, FSDP, activation checkpointing) do not appear in names, since files are for the unwrapped model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.layers.layer import LoraLayer
from inweave.ops.kinds.wrappers import is_wrapper
from inweave.ops.tensors.overlaps import overlaps
from inweave.targets.spellings import FUSED


@dataclass(slots=True)
class Site:
    module: nn.Module
    names: list[str] = field(default_factory=list)
    parents: list[tuple[nn.Module, str]] = field(default_factory=list)

    def replace(self, module: nn.Module) -> None:
        """Put ``module`` in every place of this one."""
        for parent, leaf in self.parents:
            parent.register_module(leaf, module)

    def unused(self) -> str | None:
        """Return why a module here would never be called, or None; torch may read its weight directly instead."""
        if any(isinstance(parent, nn.MultiheadAttention) for parent, _ in self.parents):
            return "torch's MultiheadAttention reads this weight and never calls the module"
        return self.compiled() or self.fused()

    def fused(self) -> str | None:
        """Return why a layer here would not be called if diffusers fused the projection with others, or None."""
        for parent, leaf in self.parents:
            if _computes_fused(parent):
                for whole, parts in FUSED:
                    if leaf in parts and isinstance(getattr(parent, whole, None), nn.Module):
                        return f"the model computes with {whole} and never calls it; unfuse_qkv_projections() first"
        return None

    def compiled(self) -> str | None:
        """Return why a layer in place of a compiled module would not be called, or None."""
        if any(leaf == "_orig_mod" for _, leaf in self.parents):
            return (
                "torch.compile keeps the original module and would not call a replacement; inject first, then compile"
            )
        return None


def _computes_fused(attention: nn.Module) -> bool:
    """Return whether diffusers' attention uses its fused projections; unfusing the older class sets its processor."""
    if not getattr(attention, "fused_projections", False):
        return False
    processor = type(getattr(attention, "processor", None)).__name__
    return "Fused" in processor or hasattr(attention, "unfuse_projections")


def sites(model: nn.Module) -> list[Site]:
    """Return ``model`` and all modules below it, except those inside LoRA layers."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected a torch module, got {type(model).__name__}")
    by_id: dict[int, Site] = {id(model): Site(model, [""])}
    for parent, leaf, name, module in _walk(model, "", ()):
        site = by_id.setdefault(id(module), Site(module))
        site.names.append(name)
        if not any(parent is other and leaf == known for other, known in site.parents):
            site.parents.append((parent, leaf))
    return list(by_id.values())


def _walk(module: nn.Module, prefix: str, above: tuple[int, ...]) -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
    if isinstance(module, LoraLayer) or id(module) in above:
        return
    for leaf, child in module._modules.items():
        if child is not None:
            name = prefix.removesuffix(".") if is_wrapper(module, leaf) else f"{prefix}{leaf}"
            yield module, leaf, name, child
            yield from _walk(child, f"{name}." if name else "", (*above, id(module)))


def unwrapped_names(model: nn.Module) -> dict[str, str]:
    """Return {name in `state_dict`: the name without wrappers}."""
    wrappers = [
        f"{name}.{leaf}." if name else f"{leaf}."
        for name, module in model.named_modules()
        for leaf in module._modules
        if is_wrapper(module, leaf)
    ]
    if not wrappers:
        return {name: name for name in model.state_dict()}
    names: dict[str, str] = {}
    for raw in model.state_dict():
        name = raw
        for prefix in sorted(wrappers, key=len, reverse=True):
            if raw.startswith(prefix):
                end = len(prefix) - len(prefix.rstrip(".").rpartition(".")[2]) - 1
                name = name[:end] + name[len(prefix) :]
        names[raw] = name
    return names


def ties(all_sites: list[Site]) -> dict[int, list[str]]:
    """Return {id of a module: names of the modules, parameters and buffers that share memory with its weight}."""
    tensors, names = dict[tuple[int, str], torch.Tensor](), dict[tuple[int, str], str]()
    for site in all_sites:
        for leaf, tensor in (*site.module._parameters.items(), *site.module._buffers.items()):
            if tensor is not None and not isinstance(tensor, nn.UninitializedParameter):
                tensors[id(site.module), leaf] = tensor
                name = site.names[0]
                names[id(site.module), leaf] = name if leaf == "weight" else f"{name}.{leaf}".lstrip(".")
    shared = overlaps(tensors)
    return {module: [names[other] for other in others] for (module, leaf), others in shared.items() if leaf == "weight"}


def keep_called(all_sites: list[Site]) -> None:
    """Disable the fast path of torch's TransformerEncoderLayer, which reads weights directly, by adding a hook."""
    for site in all_sites:
        if isinstance(site.module, nn.TransformerEncoderLayer):
            for child in site.module._modules.values():
                if isinstance(child, LoraLayer) and not child._forward_pre_hooks:
                    child.register_forward_pre_hook(_nothing)


def _nothing(module: nn.Module, inputs: object) -> None:
    return None
