"""Trainable differences of normalization layers: LyCORIS' train_norm.

    y = base(x) + sum over the live adapters of  strength * norm(x; w_norm, b_norm)
    norm(x; w, b)   the layer's normalization with another weight and bias; its output is linear in both, so this is
                    the layer with W + strength * w_norm and B + strength * b_norm

`nn.LayerNorm` and `nn.GroupNorm` with weights have them, as in LyCORIS; a subclass that computes something else, such
as one over the channels of an image, does not. Fresh differences are zero. In a file they are
`Full` changes of the weight and of the bias; `attach` without ``trainable`` adds those to the weights instead
(`inweave.layers.whole`). Dropout does not apply to them, nor does the limit of `scale_weight_norms`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.nn import functional

from inweave.adapter import Factors, Full
from inweave.errors import NotMerged, TargetError
from inweave.layers.branch import Branch, Start
from inweave.layers.layer import LoraLayer
from inweave.layers.sites import Site, keep_called, sites, ties
from inweave.ops.kinds import LayerKind
from inweave.ops.merge import all_usable
from inweave.ops.tensors.decode import TORCH, decode, encode
from inweave.ops.tensors.subclasses import holds_others

#: parameter of the layer -> that of the branch
_ROLES = {"weight": "w_norm", "bias": "b_norm"}
#: forwards that compute norm(x; w, b), if need be in float32 or in one kernel; by name, as their modules are optional
_PLAIN = frozenset({
    "torch.nn.modules.normalization.LayerNorm.forward", "torch.nn.modules.normalization.GroupNorm.forward",
    "diffusers.models.normalization.FP32LayerNorm.forward", "inweave.models.fused.blocks.FusedGroupNorm.forward",
})  # fmt: skip


class NormKind(LayerKind):
    """The kind of a normalization layer; its weight has one axis."""

    def shape(self, weight: torch.Tensor) -> tuple[int, tuple[int, ...]]:
        return weight.shape[0], tuple(weight.shape[1:])

    def apply(self, module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return normalized(module, x, weight, None)


def normalized(norm: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the output of a normalization layer with another weight and bias."""
    if isinstance(norm, nn.GroupNorm):
        if x.device.type == "cpu" and not x.requires_grad:  # torch crashes in the backward pass of channels-last ones
            x = x.contiguous()
        return functional.group_norm(x, norm.num_groups, weight, bias, norm.eps)
    assert isinstance(norm, nn.LayerNorm)
    return functional.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


class NormBranch(Branch):
    """Parameters `w_norm`, and `b_norm` if the layer has a bias."""

    w_norm: nn.Parameter
    b_norm: nn.Parameter | None
    factors_type: ClassVar[type[Factors]] = Full

    def __init__(self, w_norm: torch.Tensor, b_norm: torch.Tensor | None) -> None:
        super().__init__({"w_norm": w_norm, "b_norm": b_norm}, None)

    @classmethod
    def initial(cls, start: Start, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"w_norm": torch.zeros(start.geometry.out)}

    def variant(self) -> str:
        return "norm"

    def values(self) -> dict[str, torch.Tensor]:
        """Return the differences by the layer's parameter."""
        present = {leaf: self._parameters[role] for leaf, role in _ROLES.items()}
        return {leaf: value for leaf, value in present.items() if value is not None}


class NormLayer(LoraLayer):
    """A normalization layer with adapters."""

    def __init__(self, base: nn.Module, names: Iterable[str]) -> None:
        super().__init__(base, NormKind(), names)
        self._originals: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = self.base(x, *args, **kwargs)
        for branch, strength in self._acting:
            result = torch.add(result, branch(self._difference, x).to(result.dtype), alpha=strength)
        return result

    def _difference(self, branch: Branch, x: torch.Tensor) -> torch.Tensor:
        values = {leaf: value.to(x.dtype) for leaf, value in cast("NormBranch", branch).values().items()}
        return normalized(self.base, x, values["weight"], values.get("bias"))

    def changes(self, name: str) -> dict[str, Factors]:
        branch = cast("NormBranch", self.branch(name))
        roles = {leaf: branch._numbers(_ROLES[leaf]) for leaf in branch.values()}
        return {leaf: Full(value=encode(value), norm=True) for leaf, value in roles.items()}

    def factors(self, name: str) -> Factors:
        return self.changes(name)["weight"]

    @torch.no_grad()
    def merge(self) -> None:
        self._require_mergeable()
        woven = {leaf: self._sum(leaf) for leaf in _ROLES if self._live and self._parameters.get(leaf) is not None}
        self._originals = {leaf: getattr(self, leaf).detach().clone() for leaf in woven}
        self._merged = True  # set first, so that unmerge restores the bits even if the next lines raise
        for leaf, value in woven.items():
            getattr(self, leaf).copy_(value)
        self._refresh()

    def _sum(self, leaf: str) -> torch.Tensor:
        weight: torch.Tensor = getattr(self, leaf).detach()
        if weight.is_meta or holds_others(weight):
            raise TargetError(f"{self.label}: its {leaf} is offloaded or sharded; merge first, then offload or shard")
        total = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        for branch, strength in self._acting:
            if (value := cast("NormBranch", branch).values().get(leaf)) is not None:
                total.add_(value.to(total), alpha=strength)
        result = total.to(weight.dtype)
        if not all_usable(result) and all_usable(weight):
            raise TargetError(f"{self.label}.{leaf}: the result has numbers that {weight.dtype} cannot hold")
        return result

    @torch.no_grad()
    def unmerge(self) -> None:
        if not self._merged:
            raise NotMerged(f"{self.label}: nothing is merged")
        for leaf, value in self._originals.items():
            getattr(self, leaf).copy_(value)
        self._originals, self._merged = {}, False
        self._refresh()


def norm_problem(module: nn.Module) -> str | None:
    """Return why a module cannot have trainable differences, or None if it can."""
    base = module.base if isinstance(module, LoraLayer) else module
    weight = base._parameters.get("weight")
    if not isinstance(base, nn.LayerNorm | nn.GroupNorm) or weight is None or weight.dim() != 1:
        return f"differences are those of LayerNorm and GroupNorm with a weight of one axis, not {type(base).__name__}"
    forward = type(base).forward
    if f"{forward.__module__}.{forward.__qualname__}" not in _PLAIN:
        return f"{type(base).__name__} has a forward of its own, so differences of the plain norm would not be its own"
    return None if weight.is_floating_point() else f"its weight is stored as {weight.dtype}"


def norm_names(model: nn.Module) -> list[str]:
    """Return the (first) names of the modules that can have trainable differences."""
    return [site.names[0] for site in sites(model) if site.parents and norm_problem(site.module) is None]


def inject_norms(model: nn.Module, names: Collection[str], name: str, dtype: torch.dtype = torch.float32) -> None:
    """Add differences of zero to normalization layers, as part of the adapter ``name``, which `inject` added."""
    all_sites = sites(model)
    chosen = [site for site in all_sites if not set(names).isdisjoint(site.names)]
    put_norms(_layers_of(((site, {}) for site in chosen), all_sites, dtype), all_sites, name)


def trained_norms(
    received: list[tuple[Site, str, Factors]], all_sites: list[Site], dtype: torch.dtype | None
) -> tuple[list[tuple[Site, NormLayer, NormBranch]], list[tuple[Site, str, Factors]]]:
    """Split an adapter's whole values: (layers for the differences that can be trained, the other values)."""
    norms: dict[int, tuple[Site, dict[str, Factors]]] = {}
    others: list[tuple[Site, str, Factors]] = []
    for site, leaf, factors in received:
        plain = isinstance(factors, Full) and factors.mode == "add" and factors.magnitude is None
        present = leaf in _ROLES and site.module._parameters.get(leaf) is not None
        if plain and present and factors.widen is None and factors.scale == 1.0 and norm_problem(site.module) is None:
            norms.setdefault(id(site.module), (site, {}))[1][leaf] = factors
        else:
            others.append((site, leaf, factors))
    return list(_layers_of(norms.values(), all_sites, dtype)), others


def put_norms(layers: Iterable[tuple[Site, NormLayer, NormBranch]], all_sites: list[Site], name: str) -> None:
    """Put the layers into the model, and add one branch to each."""
    for site, layer, branch in layers:
        if site.module is not layer:
            site.replace(layer)
        layer.add(name, branch)
    keep_called(all_sites)


def _layers_of(
    chosen: Iterable[tuple[Site, dict[str, Factors]]], all_sites: list[Site], dtype: torch.dtype | None
) -> Iterator[tuple[Site, NormLayer, NormBranch]]:
    """Yield the layer of each site with a branch: of the values of a file, zeros where it has none."""
    tied = ties(all_sites)
    for site, factors in chosen:
        if reason := norm_problem(site.module) or site.unused():
            raise TargetError(f"{site.names[0]}: {reason}")
        if others := tied.get(id(site.module)):
            raise TargetError(f"{site.names[0]}: its weight is also that of {', '.join(others)}; leave it out")
        layer = site.module if isinstance(site.module, NormLayer) else NormLayer(site.module, site.names)
        yield site, layer, _branch(layer, factors, dtype)


def _branch(layer: NormLayer, factors: dict[str, Factors], dtype: torch.dtype | None) -> NormBranch:
    values: dict[str, torch.Tensor | None] = dict.fromkeys(_ROLES)
    for leaf in _ROLES:
        if (parameter := layer._parameters.get(leaf)) is None:
            continue
        if leaf in factors:
            stored = factors[leaf].tensors()["value"]
            value = decode(stored, dtype=dtype or TORCH[stored.dtype], device=layer.device)
            values[leaf] = value.reshape(parameter.shape).clone()
        else:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            values[leaf] = torch.zeros(parameter.shape, dtype=dtype or wide, device=layer.device)
    weight, bias = values.values()
    assert weight is not None
    return NormBranch(weight, bias)
