"""What kind of adapter is on networks, told by the layers themselves: one that a run goes on from brings its own.

network   lora, locon (a pair on a convolution wider than 1x1), dora, loha, lokr; several are joined by "+"
rank      the most frequent one, of all but such convolutions; conv_rank: of those; alphas likewise
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from inweave.adapter import scale
from inweave.layers import lora_layers
from inweave.training.config.schema import TrainConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """How often there is each kind, rank and alpha; ``wide``: on convolutions wider than 1x1."""

    kinds: Counter[str] = field(default_factory=Counter)
    ranks: Counter[Any] = field(default_factory=Counter)
    alphas: Counter[Any] = field(default_factory=Counter)
    wide_ranks: Counter[Any] = field(default_factory=Counter)
    wide_alphas: Counter[Any] = field(default_factory=Counter)
    rslora: Counter[bool] = field(default_factory=Counter)
    scales: Counter[float] = field(default_factory=Counter)
    modules: set[str] = field(default_factory=set)

    @property
    def network(self) -> str:
        return "locon" if set(self.kinds) == {"lora", "locon"} else "+".join(sorted(self.kinds))

    def usual(self, numbers: str) -> Any:
        """The most frequent one of ``ranks``, ``alphas``, ...; None where there is none."""
        found = getattr(self, numbers).most_common(1)
        return found[0][0] if found else None


def shape_of(networks: Mapping[str, nn.Module], name: str) -> Shape:
    """Of the adapter called ``name``."""
    found = Shape()
    for component, network in networks.items():
        for module, layer in lora_layers(network).items():
            branch, wide = layer.branch(name), layer.geometry.wide
            found.kinds[branch.variant()] += 1
            (found.wide_ranks if wide else found.ranks)[branch.rank] += 1
            (found.wide_alphas if wide else found.alphas)[
                branch.alpha if branch.alpha is not None else branch.rank
            ] += 1
            found.rslora[branch.rslora] += 1
            found.scales[branch.scale] += 1
            found.modules.add(f"{component}.{module}")
    return found


def conflicts(shape: Shape, config: TrainConfig, meant: set[str]) -> list[str]:
    """What the user asked for and an adapter to go on from is not; ``meant``: the modules `targets` means."""
    said = config.explicit_fields
    wide_ranks, wide_alphas = shape.wide_ranks or shape.ranks, shape.wide_alphas or shape.alphas
    rank = shape.usual("ranks") or config.rank
    asked = scale(config.alpha or float(rank), rank, rslora=config.rslora)
    # a file may say alpha / sqrt(rank) as another alpha over the rank, and LoKr's full factors have no rank
    same = any(math.isclose(asked, each, rel_tol=1e-3) for each in shape.scales) or None in shape.ranks
    found = {
        "network": (config.network != shape.network, config.network, shape.network),
        "rank": (not {config.rank, None} & {*shape.ranks}, config.rank, shape.usual("ranks")),
        "alpha": (config.alpha not in (None, *shape.alphas) and not same, config.alpha, shape.usual("alphas")),
        "conv_rank": (config.conv_rank not in (None, *wide_ranks), config.conv_rank, shape.usual("wide_ranks")),
        "conv_alpha": (config.conv_alpha not in (None, *wide_alphas), config.conv_alpha, shape.usual("wide_alphas")),
        "rslora": (
            config.rslora not in shape.rslora and not same,
            config.rslora,
            shape.usual("rslora"),
        ),
    }
    told = [
        f"{name}: start_from brings its own, {theirs!r}, and {ours!r} was asked for; leave it out, or start without it"
        for name, (differs, ours, theirs) in found.items()
        if differs and name in said and not (name in ("rank", "alpha") and not shape.ranks)
    ]
    if "targets" in said and meant != shape.modules:
        asked_for = config.targets if isinstance(config.targets, str) else ", ".join(config.targets)
        told.append(
            f"targets: start_from brings its own {len(shape.modules)} modules, which are not the {len(meant)} of "
            f"{asked_for}; leave it out, or start without it"
        )
    return told
