"""Choice of the trained weights: only the adapters, or some weights of the base as well.

    trainable(model, pattern)   make the chosen weights owned copies that require gradients; `collect` saves them
    freeze(model, pattern)      stop requiring gradients
    freeze_base, thaw_base      save and restore the base's state, for `inject` and `eject`

Patterns have the syntax of `inject`'s targets, and are compared with the names of parameters (`lm_head.weight`) and of
the modules that contain them (`norm1`). A frozen weight may be a view of a mapped file; trained weights are always
owned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from inweave.errors import ConfigError, TargetError
from inweave.layers.branch import Branch
from inweave.layers.layer import LoraLayer
from inweave.layers.match import Targets, matching
from inweave.layers.sites import sites
from inweave.layers.whole import all_wholes, holder, wholes_in
from inweave.ops.kinds.wrappers import is_wrapper
from inweave.ops.tensors.subclasses import class_of, holds_others

_FROZEN = "_inweave_frozen"  # attribute of a model: names of the parameters that `inject` froze
_TRAINED = "_inweave_trained"  # attribute of a module: names of its parameters that `trainable` chose

Homes = dict[str, list[tuple[nn.Module, str]]]


def trainable(model: nn.Module, pattern: Targets, *, dtype: torch.dtype | None = None) -> list[str]:
    """Make the parameters that match a pattern trainable.

    Parameters that were tied to each other stay tied. `collect` includes the modules that contain them whole, even
    after `freeze`, since they may differ from the base.

    Args:
        model: any torch module.
        pattern: names of parameters or modules, with the syntax of `inject`'s targets.
        dtype: convert the parameters to this dtype; None: keep theirs.

    Returns:
        The names of the parameters.

    Raises:
        ConfigError: an argument is invalid, or the pattern matches nothing.
        TargetError: a parameter does not have a floating-point dtype.
        MergeStateError: adapters are merged into one of the weights.
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
        if holds_others(_parameter(homes, name)):
            raise TargetError(
                f"{name}: stored as {class_of(_parameter(homes, name))}; choose trainable weights before quantizing or "
                "sharding the model"
            )
        for module, _ in homes[name]:
            if isinstance(module, LoraLayer):
                module.require_unmerged("make a weight trainable")
        for module, leaf in homes[name]:
            if (wholes := wholes_in(module)) is not None and wholes.shows_sum(leaf):
                raise TargetError(f"{name}: adapters add to it or replace rows of it, so it cannot be trained itself")
    for name in names:
        for module, leaf in homes[name]:
            wholes = wholes_in(module)
            if not isinstance(module, Branch) and (wholes is None or wholes.owner(leaf) is None):
                holder(module).__dict__.setdefault(_TRAINED, set()).add(leaf)
        old = _parameter(homes, name)
        if old.requires_grad and (dtype is None or old.dtype == dtype):
            continue
        own = nn.Parameter(old.detach().to(dtype or old.dtype, copy=True), requires_grad=True)
        for module, leaf in homes[name]:
            module._parameters[leaf] = own
    return names


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """The numbers of a model's parameters.

    Args:
        trained: how many require gradients.
        total: how many there are.
    """

    trained: int
    total: int

    @property
    def share(self) -> float:
        """The trained part of all parameters, 0 to 1."""
        return self.trained / self.total if self.total else 0.0

    def __str__(self) -> str:
        return f"{self.trained:,} of {self.total:,} parameters are trained ({self.share:.4%})"


def trainable_parameters(model: nn.Module) -> ParameterCount:
    """Count the parameters of a model, adapters included: PEFT's `print_trainable_parameters`.

    Parameters that are shared count once; weights that bitsandbytes packs in 4 bits count as unpacked.

    Args:
        model: any torch module.

    Returns:
        The two numbers with their ``share``; as text "294,912 of 124,734,720 parameters are trained (0.2364%)".

    Raises:
        ConfigError: ``model`` is not a torch module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected a torch module, got {type(model).__name__}")
    trained = total = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        shape = parameter.shape if state is None else getattr(state, "shape", parameter.shape)
        total += math.prod(shape)
        trained += math.prod(shape) if parameter.requires_grad else 0
    return ParameterCount(trained, total)


def trained_leaves(module: nn.Module) -> set[str]:
    """Return the names of a module's direct parameters that `trainable` chose."""
    leaves: set[str] = holder(module).__dict__.get(_TRAINED, set())
    return leaves


def freeze(model: nn.Module, pattern: Targets | None = None) -> list[str]:
    """Stop training the chosen parameters, or without a pattern the whole base, and return their names."""
    homes = _homes(model)
    names = _base_names(model, homes) if pattern is None else _chosen(homes, pattern)
    for name in names:
        _parameter(homes, name).requires_grad_(False)
    return names


def freeze_base(model: nn.Module) -> None:
    """Freeze the base, and record in the model which parameters required gradients."""
    homes = _homes(model)
    names = [name for name in _base_names(model, homes) if _parameter(homes, name).requires_grad]
    for name in names:
        _parameter(homes, name).requires_grad_(False)
    model.__dict__[_FROZEN] = tuple(dict.fromkeys((*model.__dict__.get(_FROZEN, ()), *names)))


def thaw_base(model: object) -> None:
    """Undo `freeze_base` on this model and its parts."""
    for site in sites(model):
        if names := site.module.__dict__.pop(_FROZEN, ()):
            homes = _homes(site.module)
            for name in names:
                if name in homes:
                    _parameter(homes, name).requires_grad_(True)


def _homes(model: nn.Module) -> Homes:
    """Return {parameter name: every (module, leaf) that holds the same parameter object}."""
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
    """Yield every module once with its name in files, which excludes wrappers."""
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
    inside |= {id(parameter) for each in all_wholes(model) for parameter in each.owned()}
    return [name for name in homes if id(_parameter(homes, name)) not in inside]


def _chosen(homes: Homes, pattern: Targets) -> list[str]:
    """Return the parameters that match a pattern: by their own name, that of their module, or that of an enclosing
    module, except adapters' parameters in the last case.
    """
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
