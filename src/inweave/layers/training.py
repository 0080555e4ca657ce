"""Which weights are trained: the adapters' alone, or chosen weights of the base along with them.

    trainable(model, pattern)   the chosen weights become the model's own copies and require a gradient; `collect` saves them
    freeze(model, pattern)      they no longer require one
    freeze_base, thaw_base      what `inject` and `eject` do: the base's own state, saved and restored

A pattern is what `inject` takes as targets, compared with the names of parameters (`lm_head.weight`) and of the
modules they are in (`norm1`). A frozen weight may be a view of a mapped file; what is trained is always owned.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import nn

from inweave.errors import ConfigError, TargetError
from inweave.layers.branch import Branch
from inweave.layers.layer import LoraLayer
from inweave.layers.match import Targets, matching
from inweave.layers.sites import sites
from inweave.ops.kinds.wrappers import is_wrapper

_FROZEN = "_inweave_frozen"  # where a model keeps the names of the parameters that inject froze
_TRAINED = "_inweave_trained"  # where a module keeps the names of its own parameters that `trainable` chose

Homes = dict[str, list[tuple[nn.Module, str]]]


def trainable(model: nn.Module, pattern: Targets, *, dtype: torch.dtype | None = None) -> list[str]:
    """Make the parameters that match ``pattern`` trainable, in ``dtype`` if given, and return their names.

    Parameters that were tied to each other stay tied. `collect` returns the modules that hold them whole, beside the
    adapter, also after `freeze`: they are no longer the base's.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected a torch module, got {type(model).__name__}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    homes = _homes(model)
    names = _chosen(homes, pattern)
    for name in names:
        if not _parameter(homes, name).is_floating_point():
            raise TargetError(f"{name}: parameters of {_parameter(homes, name).dtype} cannot be trained")
        for module, _ in homes[name]:
            if isinstance(module, LoraLayer):
                module.require_unmerged("make a weight trainable")
    for name in names:
        for module, leaf in homes[name]:
            if not isinstance(module, Branch):
                _base(module).__dict__.setdefault(_TRAINED, set()).add(leaf)
        old = _parameter(homes, name)
        if old.requires_grad and (dtype is None or old.dtype == dtype):
            continue
        own = nn.Parameter(old.detach().to(dtype or old.dtype, copy=True), requires_grad=True)
        for module, leaf in homes[name]:
            module._parameters[leaf] = own
    return names


def trained_leaves(module: nn.Module) -> set[str]:
    """The parameters of a module itself that `trainable` chose."""
    leaves: set[str] = _base(module).__dict__.get(_TRAINED, set())
    return leaves


def _base(module: nn.Module) -> nn.Module:
    """The module that a LoRA layer stands for: its marks outlive the layer."""
    return module.base if isinstance(module, LoraLayer) else module


def freeze(model: nn.Module, pattern: Targets | None = None) -> list[str]:
    """Stop training the chosen parameters; without a pattern all of the base, never the adapters."""
    homes = _homes(model)
    names = _base_names(model, homes) if pattern is None else _chosen(homes, pattern)
    for name in names:
        _parameter(homes, name).requires_grad_(False)
    return names


def freeze_base(model: nn.Module) -> None:
    """Freeze the base, and remember in the model what was not frozen before."""
    homes = _homes(model)
    names = [name for name in _base_names(model, homes) if _parameter(homes, name).requires_grad]
    for name in names:
        _parameter(homes, name).requires_grad_(False)
    model.__dict__[_FROZEN] = tuple(dict.fromkeys((*model.__dict__.get(_FROZEN, ()), *names)))


def thaw_base(model: nn.Module) -> None:
    """Let everything require a gradient again that did before `freeze_base`, on this model or a part of it."""
    for site in sites(model):
        if names := site.module.__dict__.pop(_FROZEN, ()):
            homes = _homes(site.module)
            for name in names:
                if name in homes:
                    _parameter(homes, name).requires_grad_(True)


def _homes(model: nn.Module) -> Homes:
    """parameter name -> every (module, leaf) that holds that very parameter."""
    holders: Homes = {}
    first: dict[int, str] = {}
    for prefix, module in _named_modules(model, "", set()):
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                name = first.setdefault(id(parameter), f"{prefix}.{leaf}" if prefix else leaf)
                holders.setdefault(name, []).append((module, leaf))
                holders.setdefault(f"{prefix}.{leaf}" if prefix else leaf, holders[name])
    return holders


def _named_modules(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with its name as files have it: without those of wrappers."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield name, module
    for leaf, child in module._modules.items():
        if child is not None:
            inner = name if is_wrapper(module, leaf) else f"{name}.{leaf}" if name else leaf
            yield from _named_modules(child, inner, seen)


def _parameter(homes: Homes, name: str) -> nn.Parameter:
    module, leaf = homes[name][0]
    parameter = module._parameters[leaf]
    assert parameter is not None
    return parameter


def _base_names(model: nn.Module, homes: Homes) -> list[str]:
    inside = {
        id(parameter)
        for site in sites(model)
        if isinstance(site.module, LoraLayer)
        for parameter in site.module.adapters.parameters()
    }
    return [name for name in homes if id(_parameter(homes, name)) not in inside]


def _chosen(homes: Homes, pattern: Targets) -> list[str]:
    """The parameters that a pattern names: by themselves, by their module, or by one around it, which has no adapters' own."""
    owners = {name: name.rpartition(".")[0] for name in homes}
    around = {
        name: list(accumulate(owner.split(".")[:-1], "{}.{}".format))
        for name, owner in owners.items()
        if not isinstance(homes[name][0][0], Branch)
    }
    modules = (each for name, owner in owners.items() for each in (owner, *around.get(name, ())))
    candidates = list(dict.fromkeys((*homes, *filter(None, modules))))
    hits = set(matching(pattern, candidates, candidates))
    return [name for name in homes if hits.intersection((name, owners[name], *around.get(name, ())))]
