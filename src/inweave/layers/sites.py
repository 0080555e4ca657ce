"""The sites of a model: every module once, with all its names and parents, and how to replace it.

A module used in several places is one site with several names: its weight exists once, so adapting it affects all of
them. A weight that two *different* modules hold (an embedding and the output head) is tied. Wrapper modules
(torch.compile, DDP, FSDP, activation checkpointing) do not appear in names, since files are for the unwrapped model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.layers.hosts import ParameterHost
from inweave.layers.layer import LoraLayer
from inweave.ops.kinds.pipelines import components_of
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


def sites(model: object) -> list[Site]:
    """Return ``model`` and all modules below it, except those inside LoRA layers.

    The names of a pipeline's modules begin with their component ("unet.", "te1.").
    """
    by_id: dict[int, Site] = {}
    for component, network in networks(model).items():
        by_id.setdefault(id(network), Site(network, [component]))
        for parent, leaf, name, module in _walk(network, f"{component}." if component else "", ()):
            site = by_id.setdefault(id(module), Site(module))
            site.names.append(name)
            if not any(parent is other and leaf == known for other, known in site.parents):
                site.parents.append((parent, leaf))
    return list(by_id.values())


def networks(model: object) -> Mapping[str, nn.Module]:
    """Return the networks of a pipeline by component, or a module under an empty name."""
    return {"": model} if isinstance(model, nn.Module) else components_of(model)


def one_network(model: object, call: str) -> None:
    """Raise ConfigError unless the model is one torch module."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        hint = f"; pass one of its networks: {call}(pipe.unet, ...)" if hasattr(model, "components") else ""
        raise ConfigError(f"expected a torch module, got {kind}{hint}")


def _walk(module: nn.Module, prefix: str, above: tuple[int, ...]) -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
    if isinstance(module, LoraLayer) or id(module) in above:
        return
    for leaf, child in module._modules.items():
        if child is not None:
            name = prefix.removesuffix(".") if is_wrapper(module, leaf) else f"{prefix}{leaf}"
            yield module, leaf, name, child
            yield from _walk(child, f"{name}." if name else "", (*above, id(module)))


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
                if isinstance(child, LoraLayer | ParameterHost) and not child._forward_pre_hooks:
                    child.register_forward_pre_hook(_nothing)


def _nothing(module: nn.Module, inputs: object) -> None:
    return None
