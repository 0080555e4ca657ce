"""A new adapter: on which modules, of which rank and scale, starting from which numbers.

rank, alpha   of a module: the first of the patterns that matches its name, else the general one
scale         alpha / rank, alpha / sqrt(rank) with rslora, 1 without alpha
magnitude     with dora: the norms of the weight's rows, so that the layer's output does not change yet
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from weft.errors import ConfigError, TargetError
from weft.formats.config import PeftConfig
from weft.layers.kinds import LoraLinear, kind_of
from weft.layers.layer import LoraLayer
from weft.layers.match import ALL_LINEAR, Targets, check_patterns, matching
from weft.layers.pair import Pair, fresh_factors
from weft.layers.sites import Site


@dataclass(frozen=True, slots=True)
class Options:
    """What `inject` was asked for."""

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
        ranks = (self.rank, *self.rank_pattern.values())
        alphas = (self.alpha, *self.alpha_pattern.values())
        found = [
            f"rank must be a positive whole number, got {rank!r}"
            for rank in ranks
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1
        ]
        found += [
            f"alpha must be a finite number other than 0, got {alpha!r}"
            for alpha in alphas
            if alpha is not None and (not math.isfinite(alpha) or alpha == 0)
        ]
        if self.rslora and self.alpha is None:
            found.append("rslora scales by alpha / sqrt(rank): give alpha")
        return found + check_sizes(self.dropout, self.dtype)


def check_sizes(dropout: float, dtype: torch.dtype | None) -> list[str]:
    """What is wrong with the options every adapter has."""
    found = [] if 0 <= dropout < 1 else [f"dropout must be at least 0 and below 1, got {dropout!r}"]
    if dtype is not None and not dtype.is_floating_point:
        found.append(f"dtype must be a floating-point type, got {dtype}")
    return found


def meant(model: nn.Module, found: list[Site], targets: Targets, options: Options) -> list[Site]:
    """The sites that ``targets`` means, in the model's order; raises with everything wrong about the options."""
    problems = options.problems()
    able = [site for site in found if site.parents and kind_of(site.module) is not None]
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        head = _output_head(model)
        chosen = [site for site in able if _is_linear(site) and site.module is not head and site.unused() is None]
        if not chosen:
            problems.append("'all-linear' finds no Linear layer in this model; name the targets instead")
    else:
        homes = {name: site for site in found for name in site.names if name}
        hits: list[str] = []
        try:
            hits = matching(targets, homes, [name for site in able for name in site.names])
        except ConfigError as error:
            problems.extend(error.problems)
        chosen = list({id(homes[hit]): homes[hit] for hit in hits}.values())
    if chosen:
        names = [name for site in chosen for name in site.names]
        problems += check_patterns("rank_pattern", options.rank_pattern, names)
        problems += check_patterns("alpha_pattern", options.alpha_pattern, names)
    if problems:
        raise ConfigError(problems)
    return chosen


def _is_linear(site: Site) -> bool:
    kind = kind_of(site.module)
    return kind is not None and issubclass(kind, LoraLinear)


def _output_head(model: nn.Module) -> nn.Module | None:
    """The last layer of a transformers model: "all-linear" leaves it alone, as PEFT does."""
    ask = getattr(model, "get_output_embeddings", None)
    found = ask() if callable(ask) else None
    return found if isinstance(found, nn.Module) else None


def fresh_pair(layer: LoraLayer, options: Options) -> Pair:
    """The numbers a new adapter starts from on ``layer``; they are drawn for the module's first name."""
    name, weight = layer.names[0], layer.weight.detach()
    rules, device = options.rules, layer.device
    rank = rules.rank_of(name)
    assert rank is not None
    dtype = options.dtype or torch.promote_types(weight.dtype, torch.float32)
    down, up = fresh_factors(layer.out, layer.into, rank, seed=options.seed, name=name, embedding=layer.embedding)
    magnitude = None
    if options.dora:
        if weight.is_meta:
            raise TargetError(f"{layer.label}: DoRA starts from the weight's norms, and the weight has no data yet")
        rows = weight.T if layer.transposed else weight.flatten(1)
        magnitude = torch.linalg.vector_norm(rows.to(torch.promote_types(dtype, torch.float32)), dim=1).to(dtype)
    return Pair(
        down.to(device, dtype),
        up.to(device, dtype),
        magnitude=magnitude,
        alpha=rules.alpha_of(name),
        stabilised=options.rslora,
        dropout=options.dropout,
    )
