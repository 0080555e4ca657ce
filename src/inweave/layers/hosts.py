"""Layers on bare parameters: stacked experts, and the packed projection of torch's MultiheadAttention.

    host        takes the place of a module whose forward reads the parameters itself, and shares its parameter table
    forward     base(x) with W + sum of strength * scale * product in the place of each W    torch.func.functional_call
    its layers  `<module>.<parameter>`; of a MultiheadAttention `attn.in_proj` and `attn.out_proj`

The sums have the dtype of the weights, as in PEFT, and dropout of inputs and DoRA are not defined here: there is no
output to add to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from inweave.errors import TargetError
from inweave.layers.branch import Branch, Geometry
from inweave.layers.layer import LoraLayer
from inweave.ops.kinds import LayerKind, LinearKind
from inweave.ops.kinds.offloaded import numbers
from inweave.ops.quantized import QuantizedLinear


@dataclass(frozen=True)
class ExpertsKind(LayerKind):
    """The kind of a bare parameter: stacked matrices (experts, out, in), or a matrix.

    Args:
        inputs_first: the experts are stored as (experts, in, out).
    """

    inputs_first: bool = False

    def shape(self, weight: Tensor) -> tuple[int, tuple[int, ...]]:
        return weight.shape[0], tuple(weight.shape[1:])

    def apply(self, module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
        raise TargetError("a bare parameter has no output of its own")


class ParameterLayer(LoraLayer):
    """The adapters on one parameter of a module; the `ParameterHost` that holds this layer computes with them."""

    def __init__(self, base: nn.Module, leaf: str, kind: LayerKind, name: str) -> None:
        self.__dict__["_home_of_weight"] = base._parameters, leaf
        super().__init__(base, kind, [name])
        self._parameters, self._buffers, self._non_persistent_buffers_set = {}, {}, set()
        for child in base._modules:
            self._modules.pop(child, None)

    @property
    def weight(self) -> nn.Parameter:
        table, leaf = self.__dict__["_home_of_weight"]
        return table[leaf]  # type: ignore[no-any-return]

    def numbers(self, leaf: str = "weight") -> Tensor:
        if (stored := numbers(self.base, self.__dict__["_home_of_weight"][1])) is not None:
            return stored
        raise TargetError(f"{self.label}: it is on the meta device, so it has no numbers; load it first")

    @property
    def geometry(self) -> Geometry:
        if not isinstance(self.kind, ExpertsKind):
            return super().geometry
        experts = self.out if len(self.into) > 1 else 1
        return Geometry(self.out, self.into, experts=experts, inputs_first=self.kind.inputs_first)


class ParameterHost(nn.Module):
    """A wrapper for a module that computes with parameters of its own, which the layers in it change."""

    base: nn.Module

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        self.__dict__["base"] = base
        self._parameters, self._buffers = base._parameters, base._buffers
        self._non_persistent_buffers_set = base._non_persistent_buffers_set
        self._modules.update(base._modules)
        self.training = base.training
        self.paths: dict[str, str] = {}  # name of a layer -> the parameter in the base
        self.name = name
        if isinstance(base, nn.MultiheadAttention):
            self._put(
                "in_proj", "in_proj_weight", ParameterLayer(base, "in_proj_weight", LinearKind(), f"{name}.in_proj")
            )
            self._put("out_proj", "out_proj.weight", LoraLayer(base.out_proj, LinearKind(), [f"{name}.out_proj"]))

    def layer(self, leaf: str) -> LoraLayer:
        """Return the layer of a parameter, which is made if there is none."""
        known = {path.removesuffix(".weight"): name for name, path in self.paths.items()} | {n: n for n in self.paths}
        if leaf not in known:
            first = bool(getattr(self.base, "is_transposed", False)) and self.base._parameters[leaf].dim() == 3  # type: ignore[union-attr]
            self._put(
                leaf, leaf, ParameterLayer(self.base, leaf, ExpertsKind(inputs_first=first), f"{self.name}.{leaf}")
            )
        layer = self._modules[known.get(leaf, leaf)]
        assert isinstance(layer, LoraLayer)
        return layer

    def layers(self) -> list[LoraLayer]:
        return [layer for name in self.paths if isinstance(layer := self._modules[name], LoraLayer)]

    def _put(self, name: str, path: str, layer: LoraLayer) -> None:
        self.paths[name] = path
        self._modules[name] = layer
        order = {leaf: number for number, leaf in enumerate(self.base._parameters)}  # in which PEFT nests and files go
        self.paths = dict(sorted(self.paths.items(), key=lambda item: order.get(item[1], len(order))))
        for each in self.paths:
            self._modules[each] = self._modules.pop(each)

    def register_module(self, name: str, module: nn.Module | None) -> None:
        """Put a module in the place of a child, which the base calls."""
        super().register_module(name, module)
        if name not in self.paths:
            self.base._modules[name] = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        pairs = zip(self.layers(), self.paths.values(), strict=True)
        changed = {path: weight for layer, path in pairs if (weight := _changed(layer)) is not None}
        return functional_call(self.base, changed, args, kwargs) if changed else self.base(*args, **kwargs)

    def train(self, mode: bool = True) -> ParameterHost:
        self.base.train(mode)
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "base" not in self.__dict__:
                raise
            return getattr(self.__dict__["base"], name)


def unhosted(module: nn.Module) -> nn.Module:
    """Return a module without its host."""
    return module.base if isinstance(module, ParameterHost) else module


def host_problem(module: nn.Module, leaf: str) -> str | None:
    """Return why a module's parameter cannot carry adapters, or None if it can."""
    base = unhosted(module)
    if isinstance(base, nn.MultiheadAttention):
        if not base._qkv_same_embed_dim:
            return "its queries, keys and values have different sizes, and only a packed projection takes adapters"
        if isinstance(base.out_proj, QuantizedLinear):
            return "its out_proj is quantized, and MultiheadAttention reads that weight directly; leave it unquantized"
        return None
    parameter = base._parameters.get(leaf)
    if isinstance(base, LoraLayer) or parameter is None or leaf == "weight":
        return f"{type(base).__name__} has no bare parameter {leaf!r}; name a layer's weight by the layer, in targets"
    if not parameter.is_floating_point() or parameter.dim() not in (2, 3):
        return f"{leaf} is {parameter.dtype} with {parameter.dim()} axes; adapters need numbers with two or three"
    return None


def refuse_branch(layer: LoraLayer, branch: Branch) -> str:
    """Return why a branch cannot be on a host's layer, or an empty text."""
    if branch.magnitude is not None:
        return f"{layer.label}: a bare parameter takes no DoRA"
    if branch.drops:
        return f"{layer.label}: a bare parameter takes no dropout"
    return ""


def _changed(layer: LoraLayer) -> Tensor | None:
    """Return a layer's weight with its live adapters added, or None if there are none."""
    if not layer.acting:
        return None
    weight: torch.Tensor = layer.weight
    if weight.is_meta:
        weight = layer.numbers().to(layer.device)
    for branch, strength in layer.acting:
        compute: Callable[[Branch, Tensor], Tensor] = lambda each, w, s=strength: each.added_to(w, s * each.scale)  # type: ignore[misc]  # noqa: E731
        weight = branch(compute, weight)
    return weight
