"""Tensors that a constructor computes and no checkpoint holds: non-persistent buffers, and plain attributes.

On the meta device they have no numbers, and a source has none either: Llama's `inv_freq`, masks, tables of positions.
The constructor of the module, or of the nearest module around it whose arguments are known, runs once more:

    argument   the entry of its name in the module's configuration (diffusers), or the attribute of its name
    the same   equal classes and shapes inside, equal numbers and texts as attributes, and equal values from two runs
               with different random numbers

In a module with weights `torch.empty` gives tensors on the meta device meanwhile, so that they take no memory.
Whatever cannot be computed like this is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from inweave.errors import TargetError

_OF_MODULES = frozenset(nn.Module().__dict__)
_LISTED = 5


class Constructed:
    """The values for what a model lacks, computed before anything is changed.

    Raises:
        TargetError: a value cannot be computed.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._values: list[tuple[nn.Module, str, Any]] = []
        again: dict[int, nn.Module | str] = {}
        problems: list[str] = []
        for path, module in modules.items():
            for name in _missing(module):
                value = _position_ids(module, name)
                reason = ""
                above = path
                while value is None:
                    around = modules[above]
                    copy = again[id(around)] if id(around) in again else again.setdefault(id(around), _again(around))
                    if isinstance(copy, nn.Module):
                        inner = copy.get_submodule(path[len(above) :].lstrip("."))
                        value = inner._buffers[name] if name in module._buffers else inner.__dict__[name]
                    else:
                        reason = reason or copy
                        if not above:
                            break
                        above = above.rpartition(".")[0]
                if value is None:
                    problems.append(f"{path}.{name}".lstrip(".") + f" ({reason})")
                else:
                    self._values.append((module, name, value))
        if problems:
            more = f"\n  and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
            raise TargetError(
                f"{len(problems)} tensors are on the meta device and in no checkpoint, and their constructors cannot "
                "run again; set them before building, or construct the model on the CPU:\n  "
                + "\n  ".join(problems[:_LISTED])
                + more
            )

    def put(self, model: nn.Module, device: torch.device) -> None:
        """Give the model its values, and move all non-persistent buffers to the device."""
        for module, name, value in self._values:
            if name in module._buffers:
                module._buffers[name] = _like(value, module._buffers[name], device)
            else:
                old = module.__dict__[name]
                module.__dict__[name] = tree_map(lambda new, was: _like(new, was, device), value, old)
        for module in model.modules():
            for name in module._non_persistent_buffers_set:
                if (buffer := module._buffers.get(name)) is not None:
                    module._buffers[name] = buffer.to(device)


def _missing(module: nn.Module) -> list[str]:
    """Return the names of a module's non-persistent buffers and attributes that are on the meta device."""
    members = module.__dict__.items()
    buffers = [name for name in module._non_persistent_buffers_set if _on_meta(module._buffers.get(name))]
    return sorted(buffers) + [name for name, value in members if name not in _OF_MODULES and _on_meta(value)]


def _on_meta(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta
    plain = isinstance(value, list | tuple | dict) and len(value) > 0
    return plain and any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(value))


def _like(new: Any, old: Any, device: torch.device) -> Any:
    if not isinstance(new, torch.Tensor):
        return new
    return new.detach().to(device=device, dtype=old.dtype if isinstance(old, torch.Tensor) else None)


def _position_ids(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the numbers of positions, as all models of transformers have them, without a constructor."""
    old = module._buffers.get(name)
    if name != "position_ids" or old is None or old.dtype != torch.int64:
        return None
    return torch.arange(old.shape[-1], device="cpu").expand(old.shape).clone()


class _Weightless(TorchFunctionMode):
    """`torch.empty` on the meta device: what layers make their weights with."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


def _again(module: nn.Module) -> nn.Module | str:
    """Return the module as its constructor makes it on the CPU, or the reason why it cannot."""
    kind = type(module).__name__
    arguments = _arguments(module)
    if isinstance(arguments, str):
        return f"{kind}: {arguments}"
    try:
        one, two = (_construct(module, arguments, seed) for seed in (0, 1))
    except Exception as error:  # the code of any module
        return f"{kind}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return _difference(one, module, two) or one


def _construct(module: nn.Module, arguments: Mapping[str, Any], seed: int) -> nn.Module:
    has_weights = next(module.parameters(), None) is not None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(seed)
        if not has_weights:
            return type(module)(**arguments)
        with _Weightless():
            return type(module)(**arguments)


def _arguments(module: nn.Module) -> dict[str, Any] | str:
    """Return the arguments that the module was constructed with, or which one is not known."""
    config = getattr(module, "config", None)
    known = config if isinstance(config, Mapping) else {}
    result: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in known:
            result[name] = known[name]
        elif name in module.__dict__ and name not in _OF_MODULES:
            result[name] = module.__dict__[name]
        elif isinstance(parameter.default, bool) and "config" in result:
            continue  # of transformers, for a part that is there or not: other modules show it
        elif name not in ("device", "dtype") or parameter.default is parameter.empty:
            return f"its argument {name} is not kept as an attribute"
    return result


def _difference(new: nn.Module, old: nn.Module, other: nn.Module) -> str | None:
    """Return why a module that was constructed again is not the same, or None."""
    kind = type(old).__name__
    pairs = list(zip(new.named_modules(), old.named_modules(), other.modules(), strict=False))
    if [n for n, _ in new.named_modules()] != [n for n, _ in old.named_modules()]:
        return f"{kind}: constructed again it has other modules"
    for (path, made), (_, present), twin in pairs:
        if type(made) is not type(present):
            return f"{kind}: constructed again {path} is a {type(made).__name__}"
        for name in _missing(present):
            buffer = name in present._buffers
            values, twins, olds = (
                tree_leaves(each._buffers.get(name) if buffer else each.__dict__.get(name))
                for each in (made, twin, present)
            )
            shapes = [[getattr(each, "shape", None) for each in leaves] for leaves in (values, olds)]
            if shapes[0] != shapes[1] or any(isinstance(each, torch.Tensor) and each.is_meta for each in values):
                return f"{kind}: constructed again it has another {name}"
            if not all(map(_equal, values, twins)):
                return f"{kind}: {name} holds random numbers"
        for name, value in made.__dict__.items():
            was = present.__dict__.get(name)
            if (
                type(value) in (int, float, str)
                and name not in _OF_MODULES
                and type(was) is type(value)
                and was != value
            ):
                return f"{kind}: constructed again its {name} is {value!r} instead of {was!r}"
    return None


def _equal(one: Any, two: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return True
    return (
        isinstance(two, torch.Tensor)
        and one.shape == two.shape
        and bool(torch.equal(one.nan_to_num(), two.nan_to_num()))
    )
