"""Whole values of adapters in a live model: heads, norms, biases and token rows, which have no factors to be a layer.

    parameter = the adapter's own, trainable      if one adapter is live and replaces the value (`Full`, set)
              | W + sum of the changes            otherwise, rounded once; W: the base's       `inweave.ops.delta`
              | W                                 if none is live

The module stays what it is: only the entry in its parameter table is exchanged when adapters are switched, so whatever
reads the weight sees the live one. A bias that the base lacks is created. Values of two adapters that replace the same
numbers cannot be live together. Values that are not visible follow the module to another device or dtype when they are
visible again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from inweave.adapter import Factors
from inweave.errors import ConfigError, MergeStateError, TargetError
from inweave.layers.layer import LoraLayer
from inweave.layers.sites import Site, sites, ties
from inweave.ops.delta import change
from inweave.ops.kinds.offloaded import is_hooked
from inweave.ops.merge import all_usable
from inweave.ops.tensors.decode import decode, encode

_HELD = "_inweave_whole"  # attribute of a module: its `Wholes`


@dataclass(slots=True)
class Value:
    """One adapter's change of one parameter; ``own`` is the parameter that replaces the base's."""

    factors: Factors
    own: nn.Parameter | None
    is_copy: bool

    def current(self) -> Factors:
        """Return the factors with the parameter's present numbers, in the file's bits if they have not changed."""
        if self.own is None:
            return self.factors
        stored = decode(self.factors.tensors()["value"], dtype=self.own.dtype, device=self.own.device)
        if torch.equal(stored.reshape(self.own.shape), self.own):
            return self.factors
        return replace(self.factors, value=encode(self.own))  # type: ignore[call-arg]


class Wholes:
    """The whole values that adapters have for the parameters of one module."""

    def __init__(self, module: nn.Module, label: str) -> None:
        self.module, self.label = module, label
        self.base: dict[str, nn.Parameter | None] = {}
        self.visible: dict[str, tuple[str | None, nn.Parameter | None, torch.dtype | None]] = {}
        self.values: dict[str, dict[str, Value]] = {}  # adapter -> parameter -> its change
        self.strengths: dict[str, float] = {}
        self.active: tuple[str, ...] = ()
        self.off = False

    def add(self, name: str, leaf: str, factors: Factors, *, is_copy: bool = False) -> None:
        """Add an adapter's change of one parameter, active at strength 1; `show` puts it into the module.

        ``is_copy``: another module shares the parameter, and `collect` finds the change there.
        """
        base = self.module._parameters.get(leaf)
        if leaf not in self.base:
            self.base[leaf] = base
            self.visible[leaf] = (None, base, None if base is None else base.dtype)
        like = self._like(leaf)
        own = None
        if factors.replaced_rows is None and not factors.transposed:
            value = factors.tensors()["value"]
            shape = value.shape if base is None else base.shape
            own = nn.Parameter(decode(value, dtype=like.dtype, device=like.device).reshape(shape).clone())
        self.values.setdefault(name, {})[leaf] = Value(copy.deepcopy(factors), own, is_copy)
        if name not in self.strengths:
            self.strengths[name] = 1.0
            self.active = (*self.active, name)

    def require_gradients(self, name: str, required: bool) -> None:
        """Choose whether an adapter's own parameters are trained."""
        for value in self.values[name].values():
            if value.own is not None:
                value.own.requires_grad_(required)

    def live(self, leaf: str) -> list[str]:
        return [
            name
            for name in sorted(self.active)
            if not self.off and self.strengths[name] != 0 and leaf in self.values[name]
        ]

    def owner(self, leaf: str) -> str | None:
        """Return the adapter whose own parameter is visible, or None."""
        return self.visible[leaf][0] if leaf in self.visible else None

    def shows_sum(self, leaf: str) -> bool:
        """Return whether the visible parameter is computed from the base's and adapters' values."""
        owner, parameter, _ = self.visible.get(leaf, (None, self.base.get(leaf), None))
        return owner is None and parameter is not self.base.get(leaf)

    def current(self, name: str) -> dict[str, Factors]:
        """Return the present values of an adapter by parameter."""
        for leaf in self.base:
            self._follow(leaf)
        return {leaf: value.current() for leaf, value in self.values.get(name, {}).items() if not value.is_copy}

    def owned(self) -> list[nn.Parameter]:
        """Return the parameters that belong to adapters."""
        return [value.own for values in self.values.values() for value in values.values() if value.own is not None]

    @torch.no_grad()
    def result(self) -> dict[str, tuple[str | None, nn.Parameter | None]]:
        """Return {parameter: (its owner, what to show)}; raise before anything is changed."""
        results: dict[str, tuple[str | None, nn.Parameter | None]] = {}
        for leaf, base in self.base.items():
            self._follow(leaf)
            live = self.live(leaf)
            self._refuse_conflict(leaf, live)
            if not live:
                results[leaf] = None, base
            elif len(live) == 1 and (own := self.values[live[0]][leaf].own) is not None:
                results[leaf] = live[0], own
            else:
                results[leaf] = None, self._sum(leaf, base, live)
            visible = self.module._parameters.get(leaf)
            is_elsewhere = visible is not None and (visible.is_meta or is_hooked(self.module))
            if is_elsewhere and results[leaf][1] is not visible:
                raise MergeStateError(f"{self.label}.{leaf}: its value is offloaded, so adapters cannot be switched")
        return results

    def show(self, results: Mapping[str, tuple[str | None, nn.Parameter | None]]) -> None:
        """Put the results into the module's parameter table."""
        for leaf, (owner, parameter) in results.items():
            self.module._parameters[leaf] = parameter
            self.visible[leaf] = owner, parameter, None if parameter is None else parameter.dtype

    def state(self) -> tuple[dict[str, dict[str, Value]], dict[str, float], tuple[str, ...], bool]:
        """Return a copy of what `switching` restores after an error."""
        return {name: dict(own) for name, own in self.values.items()}, dict(self.strengths), self.active, self.off

    def forget(self, name: str) -> None:
        self.values.pop(name, None)
        self.strengths.pop(name, None)
        self.active = tuple(other for other in self.active if other != name)

    def _like(self, leaf: str) -> torch.Tensor:
        """Return a tensor of the dtype and on the device that the parameter should have."""
        parameters = self.module._parameters
        present = parameters.get(leaf)
        present = present if present is not None else self.base.get(leaf)
        present = present if present is not None else parameters.get("weight")
        assert present is not None
        return present

    def _follow(self, leaf: str) -> None:
        """Adopt a parameter that took the place of the visible one, and follow conversions of the module."""
        owner, visible, dtype = self.visible[leaf]
        present = self.module._parameters.get(leaf)
        if present is not None and present is not visible:
            if owner is not None:
                self.values[owner][leaf].own = present
            elif visible is self.base[leaf]:
                self.base[leaf] = present
        if present is None or present.is_meta:
            return
        others = [values[leaf].own for values in self.values.values() if leaf in values]
        for other in (self.base[leaf], *others):
            if other is None or other is present:
                continue
            if other.device != present.device or (dtype is not None and dtype != present.dtype):
                other.data = other.data.to(present.device, present.dtype if dtype != present.dtype else other.dtype)

    def _sum(self, leaf: str, base: nn.Parameter | None, live: Iterable[str]) -> nn.Parameter:
        like = self._like(leaf)
        weight = base.detach() if base is not None else like.new_zeros(self._rows())
        total = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        for name in live:
            value = self.values[name][leaf]
            total += change(value.current(), weight, self.strengths[name])
        result = total.to(weight.dtype)
        if not all_usable(result) and all_usable(weight):
            raise TargetError(f"{self.label}.{leaf}: the result has numbers that {weight.dtype} cannot hold")
        return nn.Parameter(result, requires_grad=False)

    def _rows(self) -> int:
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight.shape[0]

    def _refuse_conflict(self, leaf: str, live: Iterable[str]) -> None:
        replacer: dict[int | None, str] = {}
        for name in live:
            factors = self.values[name][leaf].factors
            if not factors.replaces:
                continue
            for row in (None,) if factors.replaced_rows is None else factors.replaced_rows:
                other = (
                    replacer.get(row)
                    or replacer.get(None)
                    or (next(iter(replacer.values()), None) if row is None else None)
                )
                if other is not None and other != name:
                    raise ConfigError(
                        f"{self.label}.{leaf}: {other!r} and {name!r} both replace it, so only one of them can be "
                        "active; call activate(model, []) before attaching another, then activate one of them"
                    )
                replacer[row] = name


def holder(module: nn.Module) -> nn.Module:
    """Return the module that a LoRA layer wraps, whose attributes outlive the layer, or the module itself."""
    return module.base if isinstance(module, LoraLayer) else module


def wholes_in(module: nn.Module) -> Wholes | None:
    """Return the whole values that adapters have for a module's own parameters, or None."""
    return holder(module).__dict__.get(_HELD)


def all_wholes(model: object) -> list[Wholes]:
    """Return the whole values of every module of a model."""
    return [wholes for site in sites(model) if (wholes := wholes_in(site.module)) is not None]


def obstacle(module: nn.Module, leaf: str, factors: Factors, *, creates: bool) -> str | None:
    """Return why a module's parameter cannot take this value, or None if it can."""
    parameters = holder(module)._parameters
    present = parameters.get(leaf)
    if factors.widen is not None:
        return "it widens the weight"
    if present is None and not (creates and leaf == "bias" and parameters.get("weight") is not None):
        return f"{type(holder(module)).__name__} has no parameter called {leaf}"
    for tensor in (present, parameters.get("weight")) if present is None else (present,):
        if tensor is not None and (not tensor.is_floating_point() or type(tensor.detach()) is not torch.Tensor):
            return f"its {leaf} is quantized or sharded, and only plain floating-point numbers can be exchanged"
        if tensor is not None and tensor.is_meta:
            return "its weight has no data here (meta, or offloaded): attach before offloading"
    return None


def wholes_of(module: nn.Module, label: str) -> Wholes:
    """Return the whole values of a module, which is given an empty `Wholes` if it has none."""
    base = holder(module)
    return base.__dict__.setdefault(_HELD, Wholes(base, label))  # type: ignore[no-any-return]


@contextmanager
def switching(every: Iterable[Wholes]) -> Iterator[None]:
    """Change the state of whole values in the block, and show the results after it: all of them, or none."""
    every = list(every)
    before = [each.state() for each in every]
    try:
        yield
        results = [each.result() for each in every]
    except BaseException:
        for each, state in zip(every, before, strict=True):
            each.values, each.strengths, each.active, each.off = state
        raise
    for each, result in zip(every, results, strict=True):
        each.show(result)
        if not each.values:
            each.module.__dict__.pop(_HELD, None)


def remove_wholes(model: object, *, keep: bool = False) -> None:
    """Put the base's parameters back, or with ``keep`` leave those that are visible."""
    every = all_wholes(model)
    with switching([] if keep else every):
        for each in () if keep else every:
            each.values, each.strengths, each.active = {}, {}, ()
    for each in every:
        each.module.__dict__.pop(_HELD, None)


def shared_by(
    received: Iterable[tuple[Site, str, Factors]], all_sites: Iterable[Site], allow_tied: bool
) -> list[tuple[Site, str, Factors, bool]]:
    """Return the values with every module that receives them: (site, parameter, factors, whether it is a copy).

    Token rows also go to the modules that hold the same parameter, as in PEFT; another shared weight is refused.
    """
    all_sites = list(all_sites)
    tied, problems = ties(all_sites), list[str]()
    result: list[tuple[Site, str, Factors, bool]] = []
    for site, leaf, factors in received:
        result.append((site, leaf, factors, False))
        others = tied.get(id(site.module), []) if leaf == "weight" else []
        if factors.replaced_rows and others:
            visible = holder(site.module)._parameters[leaf]
            same = [
                (other, at)
                for other in all_sites
                for at, parameter in holder(other.module)._parameters.items()
                if parameter is visible and other is not site
            ]
            result += [(other, at, factors, True) for other, at in same]
            others = others if len(same) < len(others) else []
        if others and not allow_tied:
            problems.append(
                f"{site.names[0]}: its weight is also that of {', '.join(others)}, which would keep the base's; "
                "use allow_tied=True"
            )
    if problems:
        raise TargetError("\n".join(problems))
    return result
