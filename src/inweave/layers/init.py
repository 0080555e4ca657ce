"""A new adapter: on which modules, of which rank and scale, starting from which numbers.

rank, alpha   of a module: the first of the patterns that matches its name, else the general one
scale         alpha / rank, alpha / sqrt(rank) with rslora, 1 without alpha
              1 on a LoKr module where both factors are full: it has no rank to divide by (`inweave.adapter.scale`)
magnitude     with dora: the norms of the weight's rows, so that the layer's output does not change yet
network       "lora", "loha" or "lokr": which product is trained, see `inweave.layers.term`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from inweave.errors import ConfigError, TargetError
from inweave.formats.config import PeftConfig
from inweave.layers.kinds import LoraLinear, kind_of
from inweave.layers.layer import LoraLayer
from inweave.layers.loha import Hadamard, fresh_hadamard
from inweave.layers.lokr import Kronecker, fresh_kronecker
from inweave.layers.lora import Pair, fresh_pair
from inweave.layers.match import ALL_LINEAR, Targets, check_patterns, matching
from inweave.layers.sites import Site
from inweave.layers.term import Shared, Term

Network = Literal["lora", "loha", "lokr"]


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
    network: Network
    factor: int
    decompose_both: bool

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
        if self.network not in get_args(Network):
            found.append(f"network must be one of {', '.join(get_args(Network))}, got {self.network!r}")
        elif self.network != "lokr" and (self.factor != -1 or self.decompose_both):
            found.append(f"factor and decompose_both belong to lokr; a {self.network} has no such choice")
        if type(self.factor) is not int or self.factor == 0 or self.factor < -1:
            found.append(f"factor must be a positive whole number, or -1 for the most even one, got {self.factor!r}")
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


def fresh_term(layer: LoraLayer, options: Options) -> Term:
    """The numbers a new adapter starts from on ``layer``; they are drawn for the module's first name."""
    name, weight = layer.names[0], layer.weight.detach()
    rules, device, out, into = options.rules, layer.device, layer.out, layer.into
    rank, seed = rules.rank_of(name), options.seed
    assert rank is not None
    dtype = options.dtype or torch.promote_types(weight.dtype, torch.float32)
    shared: Shared = {
        "magnitude": _row_norms(layer, weight, dtype) if options.dora else None,
        "alpha": rules.alpha_of(name),
        "rslora": options.rslora,
        "dropout": options.dropout,
    }
    if options.network == "lora":
        made = fresh_pair(out, into, rank, seed=seed, name=name, embedding=layer.embedding)
        return Pair(made["down"].to(device, dtype), made["up"].to(device, dtype), **shared)
    if shared["alpha"] is None:  # the same scale; LyCORIS cannot read a file without alpha
        shared["alpha"] = float(rank)
    if options.network == "loha":
        made = fresh_hadamard(out, into, rank, seed=seed, name=name)
        return Hadamard(**{role: value.to(device, dtype) for role, value in made.items()}, **shared)
    made = fresh_kronecker(out, into, rank, factor=options.factor, both=options.decompose_both, seed=seed, name=name)
    if "w1" in made and "w2" in made:  # scale 1 whatever alpha says; to say it, LyCORIS stores the network's rank
        shared["alpha"] = float(options.rank)
    roles: dict[str, Any] = {role: value.to(device, dtype) for role, value in made.items()}
    return Kronecker(**roles, **shared)


def _row_norms(layer: LoraLayer, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if weight.is_meta:
        raise TargetError(f"{layer.label}: DoRA starts from the weight's norms, and the weight has no data yet")
    rows = weight.T if layer.transposed else weight.flatten(1)
    norms: torch.Tensor = torch.linalg.vector_norm(rows.to(torch.promote_types(dtype, torch.float32)), dim=1)
    return norms.to(dtype)
