"""Put LoRA, LoHa or LoKr into a live model, and take it out again.

    inject(model, rank, alpha, targets)   new adapters on the modules meant (`inweave.layers.init`)
    inject(model, adapter)                an adapter from a file, placed by its names (`inweave.layers.from_adapter`)
    eject(model)                          the original modules, the same objects, back in their places

Everything is checked before the model is touched. The base is frozen; what then requires a gradient is the
adapters' parameters. `eject` gives every parameter back the `requires_grad` it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from inweave.adapter import Adapter
from inweave.errors import ConfigError, MergeStateError, TargetError
from inweave.layers.factors import to_term
from inweave.layers.from_adapter import placed
from inweave.layers.init import Network, Options, check_sizes, fresh_term, meant
from inweave.layers.kinds import kind_of, unfit
from inweave.layers.layer import LoraLayer
from inweave.layers.match import ALL_LINEAR, Targets
from inweave.layers.sites import Site, keep_called, sites, ties
from inweave.layers.state import all_layers
from inweave.layers.training import freeze_base, thaw_base

Model = TypeVar("Model", bound=nn.Module)
_NONE: Mapping[str, Any] = MappingProxyType({})


def inject(
    model: Model,
    rank: int | Adapter = 16,
    alpha: float | None = None,
    targets: Targets = ALL_LINEAR,
    *,
    name: str = "default",
    dropout: float = 0.0,
    network: Network = "lora",
    factor: int = -1,
    decompose_both: bool = False,
    dora: bool = False,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] = _NONE,
    alpha_pattern: Mapping[str, float] = _NONE,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    allow_tied: bool = False,
    freeze: bool = True,
    component: str | None = None,
) -> Model:
    """Add an adapter called ``name`` to ``model`` and return the model.

    ``rank`` may be an `Adapter`, which brings its own modules and numbers: then only ``name``, ``dropout``,
    ``dtype``, ``allow_tied``, ``freeze`` and ``component`` may be given. Without ``alpha`` the scale is 1.

    ``network``      "lora", "loha" or "lokr", as LyCORIS names and starts them; the last two not on embeddings
    ``factor``       LoKr: the size of the small factor, where it divides; -1 cuts each axis most evenly
    ``decompose_both``  LoKr: the small factor too is low-rank where that is smaller. Where both factors come out
                     full, ``alpha`` has nothing to be divided by and the scale is 1
    ``dtype``        of the new parameters; float32 unless the base is wider, or as the adapter stores them
    ``allow_tied``   adapt a module whose weight another module also holds: only the named one changes,
                     and a merge gives it a weight of its own
    ``freeze``       stop training the base
    ``component``    one network of an adapter made for several: "unet", "te1", ...
    """
    _check_name(model, name)
    found = sites(model)
    if isinstance(rank, Adapter):
        given = {"alpha": alpha, "dora": dora, "rslora": rslora, "rank_pattern": rank_pattern,
                 "alpha_pattern": alpha_pattern, "seed": seed, "network": network != "lora", "factor": factor != -1,
                 "decompose_both": decompose_both}  # fmt: skip
        _check_alone(given | ({} if targets is ALL_LINEAR else {"targets": True}), dropout, dtype)
        plan = placed(model, rank, found, component)
        layers = _wrapped([site for site, _ in plan], found, allow_tied)
        terms = [
            to_term(factors, layer.out, layer.into, dtype=dtype, device=layer.device, dropout=dropout)
            for layer, (_, factors) in zip(layers.values(), plan, strict=True)
        ]
    else:
        if component is not None:
            raise ConfigError("component chooses a part of an adapter from a file; a new adapter has none")
        options = Options(rank, alpha, dropout, dora, rslora, rank_pattern, alpha_pattern, seed, dtype,
                          network, factor, decompose_both)  # fmt: skip
        layers = _wrapped(meant(model, found, targets, options), found, allow_tied, network)
        terms = [fresh_term(layer, options) for layer in layers.values()]
    if freeze:
        freeze_base(model)
    homes = {id(site.module): site for site in found}
    for (module, layer), term in zip(layers.items(), terms, strict=True):
        if layer is not module:
            homes[id(module)].replace(layer)
        layer.add(name, term)
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


def _check_alone(given: Mapping[str, object], dropout: float, dtype: torch.dtype | None) -> None:
    """An adapter from a file brings its own modules, ranks and scales."""
    problems = [f"{option}: the adapter brings its own; it cannot be given" for option, value in given.items() if value]
    problems += check_sizes(dropout, dtype)
    if problems:
        raise ConfigError(problems)


def _wrapped(
    chosen: list[Site], found: list[Site], allow_tied: bool, network: Network = "lora"
) -> dict[nn.Module, LoraLayer]:
    """module -> its layer, not yet in the model; raises with every module that cannot have one."""
    tied, problems = ties(found), []
    for site in chosen:
        if reason := unfit(site.module) or site.unused():
            problems.append(f"{' = '.join(site.names)}: {reason}")
        elif network != "lora" and (kind := kind_of(site.module)) is not None and kind.embedding:
            problems.append(f"{' = '.join(site.names)}: an embedding takes LoRA only, not {network}")
        elif (others := tied.get(id(site.module))) and not allow_tied:
            problems.append(
                f"{' = '.join(site.names)}: its weight is also that of {', '.join(others)}, which would not be "
                "adapted; leave it out, or say allow_tied=True"
            )
    if problems:
        raise TargetError("\n".join(problems))
    layers: dict[nn.Module, LoraLayer] = {}
    for site in chosen:
        kind = kind_of(site.module)
        assert kind is not None
        known = site.module if isinstance(site.module, LoraLayer) else None
        layers[site.module] = known or kind(site.module, site.names, tied=id(site.module) in tied)
    return layers
