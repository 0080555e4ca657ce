"""Put LoRA into a live model, and take it out again.

    inject(model, rank, alpha, targets)   new adapters on the modules meant (`weft.layers.match`)
    inject(model, adapter)                an adapter from a file, placed by its names (`weft.layers.placed`)
    eject(model)                          the original modules, the same objects, back in their places

Everything is checked before the model is touched. The base is frozen; what then requires a gradient is the
adapters' parameters. `eject` gives every parameter back the `requires_grad` it had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import nn

from weft.adapter import Adapter
from weft.errors import ConfigError, MergeStateError, TargetError
from weft.formats.config import PeftConfig
from weft.layers.factors import to_pair
from weft.layers.kinds import kind_of, unfit
from weft.layers.layer import LoraLayer
from weft.layers.match import ALL_LINEAR, Targets, check_patterns, matching
from weft.layers.pair import Pair, fresh_factors
from weft.layers.placed import placed
from weft.layers.sites import Site, keep_called, sites, ties
from weft.layers.state import all_layers
from weft.layers.training import freeze_base, thaw_base

Model = TypeVar("Model", bound=nn.Module)
_NONE: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Options:
    rank: int
    alpha: float | None
    dropout: float
    dora: bool
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    seed: int
    dtype: torch.dtype | None

    @property
    def rules(self) -> PeftConfig:
        """The rank and alpha of a module, by PEFT's own rule."""
        return PeftConfig(
            rank=self.rank, alpha=self.alpha, rank_pattern=self.rank_pattern, alpha_pattern=self.alpha_pattern
        )

    def problems(self) -> list[str]:
        found = [f"rank must be a positive whole number, got {rank!r}"
                 for rank in (self.rank, *self.rank_pattern.values())
                 if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1]  # fmt: skip
        found += [f"alpha must be a finite number other than 0, got {alpha!r}"
                  for alpha in (self.alpha, *self.alpha_pattern.values())
                  if alpha is not None and (not math.isfinite(alpha) or alpha == 0)]  # fmt: skip
        if not 0 <= self.dropout < 1:
            found.append(f"dropout must be at least 0 and below 1, got {self.dropout!r}")
        if self.rslora and self.alpha is None:
            found.append("rslora scales by alpha / sqrt(rank): give alpha")
        if self.dtype is not None and not self.dtype.is_floating_point:
            found.append(f"dtype must be a floating-point type, got {self.dtype}")
        return found


def inject(
    model: Model,
    rank: int | Adapter = 16,
    alpha: float | None = None,
    targets: Targets = ALL_LINEAR,
    *,
    name: str = "default",
    dropout: float = 0.0,
    dora: bool = False,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] = MappingProxyType({}),
    alpha_pattern: Mapping[str, float] = _NONE,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    allow_tied: bool = False,
    freeze: bool = True,
    component: str | None = None,
) -> Model:
    """Add an adapter called ``name`` to ``model`` and return the model.

    ``rank`` may be an `Adapter`: its factors are used and only ``name``, ``dropout``, ``dtype``, ``allow_tied``,
    ``freeze`` and ``component`` apply. Without ``alpha`` the scale is 1. ``dtype``: of the new parameters; float32
    unless the base is wider, or as the adapter stores them. ``allow_tied`` adapts a module whose weight another
    module also holds: only the named one changes, and a merge unties it. ``component`` picks one network of an
    adapter made for several ("unet", "te1", ...).
    """
    _check_name(model, name)
    found = sites(model)
    if isinstance(rank, Adapter):
        if not 0 <= dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {dropout!r}")
        plan = placed(model, rank, found, component)
        chosen = [site for site, _ in plan]
    else:
        options = _Options(rank, alpha, dropout, dora, rslora, rank_pattern, alpha_pattern, seed, dtype)
        chosen = _meant(model, found, targets, options)
    tied = ties(found)
    _check_sites(chosen, tied, allow_tied)
    layers = [_layer(site, bool(tied.get(id(site.module)))) for site in chosen]
    pairs: list[Pair]
    if isinstance(rank, Adapter):
        pairs = [
            to_pair(factors, layer.out, layer.into, dtype=dtype, device=_device(layer), dropout=dropout)
            for layer, (_, factors) in zip(layers, plan, strict=True)
        ]
    else:
        pairs = [_fresh(layer, options) for layer in layers]
    if freeze:
        freeze_base(model)
    for site, layer, pair in zip(chosen, layers, pairs, strict=True):
        if layer is not site.module:
            site.replace(layer)
        layer.add(name, pair)
    keep_called(found)
    return model


def eject(model: Model, *, keep_merged: bool = False) -> Model:
    """Remove all LoRA layers; with ``keep_merged`` what is merged stays in the weights for good."""
    layers = all_layers(model)
    merged = [layer for layer in layers if layer.merged]
    if merged and not keep_merged:
        raise MergeStateError(
            f"{len(merged)} layers are merged, {merged[0].label} the first: unmerge before ejecting, "
            "or say keep_merged=True to leave the merged weights in place"
        )
    for site in sites(model):
        if isinstance(site.module, LoraLayer):
            site.replace(site.module.base)
    thaw_base(model)
    return model.base if isinstance(model, LoraLayer) else model  # type: ignore[return-value]


def _check_name(model: nn.Module, name: str) -> None:
    if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict, name):
        raise ConfigError(f"{name!r} cannot be an adapter's name: any word without dots will do")
    for site in sites(model):
        if isinstance(site.module, LoraLayer):
            site.module.require_unmerged("inject")
            if name in site.module.adapters:
                raise ConfigError(
                    f"an adapter {name!r} is already injected (on {site.module.label}); "
                    "delete it first, or give the new one another name"
                )


def _meant(model: nn.Module, found: list[Site], targets: Targets, options: _Options) -> list[Site]:
    """The sites that ``targets`` means, in the model's order."""
    problems = options.problems()
    able = [site for site in found if site.names != [""] and kind_of(site.module) is not None]
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        head = _output_head(model)
        chosen = [site for site in able if _is_linear(site) and site.module is not head and site.unused() is None]
        if not chosen:
            problems.append("'all-linear' finds no Linear layer in this model; name the targets instead")
    else:
        homes = {name: site for site in found for name in site.names if name}
        try:
            hits = matching(targets, homes, [name for site in able for name in site.names])
        except ConfigError as error:
            problems.extend(error.problems)
            hits = []
        chosen = list({id(homes[hit]): homes[hit] for hit in hits}.values())
    names = [name for site in chosen for name in site.names]
    if chosen:
        for field_name, table in (("rank_pattern", options.rank_pattern), ("alpha_pattern", options.alpha_pattern)):
            problems += check_patterns(field_name, table, names)
    if problems:
        raise ConfigError(problems)
    return chosen


def _is_linear(site: Site) -> bool:
    kind = kind_of(site.module)
    return kind is not None and kind.__name__ in ("LoraLinear", "LoraConv1D")


def _output_head(model: nn.Module) -> nn.Module | None:
    """The last layer of a transformers model: "all-linear" leaves it alone, as PEFT does."""
    ask = getattr(model, "get_output_embeddings", None)
    found = ask() if callable(ask) else None
    return found if isinstance(found, nn.Module) else None


def _check_sites(chosen: list[Site], tied: Mapping[int, list[str]], allow_tied: bool) -> None:
    problems = []
    for site in chosen:
        if reason := unfit(site.module) or site.unused():
            problems.append(f"{' = '.join(site.names)}: {reason}")
        elif (others := tied.get(id(site.module))) and not allow_tied:
            problems.append(
                f"{' = '.join(site.names)}: its weight is also that of {', '.join(others)}, which would not be "
                "adapted; leave it out, or say allow_tied=True"
            )
    if problems:
        raise TargetError("\n".join(problems))


def _layer(site: Site, tied: bool) -> LoraLayer:
    if isinstance(site.module, LoraLayer):
        return site.module
    kind = kind_of(site.module)
    assert kind is not None
    return kind(site.module, site.names, tied=tied)


def _fresh(layer: LoraLayer, options: _Options) -> Pair:
    name = layer.names[0]
    rank = options.rules.rank_of(name) or options.rank
    weight: torch.Tensor = layer.weight
    dtype = options.dtype or torch.promote_types(weight.dtype, torch.float32)
    down, up = fresh_factors(layer.out, layer.into, rank, seed=options.seed, name=name, embedding=layer.embedding)
    device = _device(layer)
    magnitude = None
    if options.dora:
        if weight.is_meta:
            raise TargetError(f"{layer.label}: DoRA starts from the weight's norms, and the weight has no data yet")
        rows = weight.detach().T if layer.transposed else weight.detach().flatten(1)
        magnitude = torch.linalg.vector_norm(rows.to(torch.promote_types(dtype, torch.float32)), dim=1).to(dtype)
    return Pair(
        down.to(device, dtype),
        up.to(device, dtype),
        magnitude=magnitude,
        alpha=options.rules.alpha_of(name),
        stabilised=options.rslora,
        dropout=options.dropout,
    )


def _device(layer: LoraLayer) -> torch.device:
    """The weight's; a model that has no data yet gets its adapters on the CPU."""
    device: torch.device = layer.weight.device
    return torch.device("cpu") if device.type == "meta" else device
