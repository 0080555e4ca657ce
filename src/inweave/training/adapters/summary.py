"""A summary of the adapters attached to networks, read from the layers: an adapter to start from defines its own.

network   lora, locon (LoRA on a convolution wider than 1x1), dora, loha, lokr; several are joined by "+"
rank      the most frequent one except on such convolutions; conv_rank: on those; alphas likewise
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
from inweave.layers.norms import NormLayer
from inweave.training.config.schema import TrainConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """Counts of each kind, rank and alpha; ``wide``: on convolutions wider than 1x1; ``norms``: their differences."""

    kinds: Counter[str] = field(default_factory=Counter)
    ranks: Counter[Any] = field(default_factory=Counter)
    alphas: Counter[Any] = field(default_factory=Counter)
    wide_ranks: Counter[Any] = field(default_factory=Counter)
    wide_alphas: Counter[Any] = field(default_factory=Counter)
    rslora: Counter[bool] = field(default_factory=Counter)
    scales: Counter[float] = field(default_factory=Counter)
    modules: set[str] = field(default_factory=set)
    norms: set[str] = field(default_factory=set)

    @property
    def network(self) -> str:
        return "locon" if set(self.kinds) == {"lora", "locon"} else "+".join(sorted(self.kinds))

    def usual(self, numbers: str) -> Any:
        """Return the most frequent value of ``ranks``, ``alphas``, ...; None if there are none."""
        most = getattr(self, numbers).most_common(1)
        return most[0][0] if most else None


def shape_of(networks: Mapping[str, nn.Module], name: str) -> Shape:
    """Summarize the adapter called ``name``."""
    shape = Shape()
    for component, network in networks.items():
        for module, layer in lora_layers(network).items():
            if isinstance(layer, NormLayer):
                shape.norms.add(f"{component}.{module}")
                continue
            branch, wide = layer.branch(name), layer.geometry.wide
            shape.kinds[branch.variant()] += 1
            (shape.wide_ranks if wide else shape.ranks)[branch.rank] += 1
            alpha = branch.alpha if branch.alpha is not None else branch.rank
            (shape.wide_alphas if wide else shape.alphas)[alpha] += 1
            shape.rslora[branch.rslora] += 1
            shape.scales[branch.scale] += 1
            shape.modules.add(f"{component}.{module}")
    return shape


def conflicts(shape: Shape, config: TrainConfig, targeted: set[str]) -> list[str]:
    """Return settings that contradict the adapter to start from; ``targeted``: the modules that `targets` selects."""
    explicit = config.explicit_fields
    wide_ranks, wide_alphas = shape.wide_ranks or shape.ranks, shape.wide_alphas or shape.alphas
    rank = shape.usual("ranks") or config.rank
    expected = scale(config.alpha or float(rank), rank, rslora=config.rslora)
    # a file may express alpha / sqrt(rank) as another alpha over the rank, and LoKr's full factors have no rank
    same = any(math.isclose(expected, each, rel_tol=1e-3) for each in shape.scales) or None in shape.ranks
    settings = {
        "network": (config.network != shape.network, config.network, shape.network),
        "rank": (not {config.rank, None} & {*shape.ranks}, config.rank, shape.usual("ranks")),
        "alpha": (config.alpha not in (None, *shape.alphas) and not same, config.alpha, shape.usual("alphas")),
        "conv_rank": (config.conv_rank not in (None, *wide_ranks), config.conv_rank, shape.usual("wide_ranks")),
        "conv_alpha": (config.conv_alpha not in (None, *wide_alphas), config.conv_alpha, shape.usual("wide_alphas")),
        "rslora": (config.rslora not in shape.rslora and not same, config.rslora, shape.usual("rslora")),
        "train_norm": (config.train_norm != bool(shape.norms), config.train_norm, bool(shape.norms)),
    }
    problems = [
        f"{name}: start_from has {theirs!r}, but {ours!r} is set; leave it out, or train without start_from"
        for name, (differs, ours, theirs) in settings.items()
        if differs and name in explicit and not (name in ("rank", "alpha") and not shape.ranks)
    ]
    if "targets" in explicit and targeted != shape.modules:
        targets = config.targets if isinstance(config.targets, str) else ", ".join(config.targets)
        problems.append(
            f"targets: start_from adapts {len(shape.modules)} modules, which are not the {len(targeted)} of "
            f"{targets}; leave it out, or train without start_from"
        )
    return problems
