"""The choices about a new adapter that usually keep their defaults, in one value: `AdapterSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import TypedDict, Unpack

import torch

from inweave.errors import ConfigError

#: the dropouts of an adapter, see `inweave.layers.dropout`; all but the first are between its factors
DROPOUTS = ("dropout", "hidden_dropout", "rank_dropout")


class SpecOptions(TypedDict, total=False):
    """The fields of an `AdapterSpec`, as keyword arguments."""

    network: str
    dora: bool
    rslora: bool
    dropout: float
    hidden_dropout: float
    rank_dropout: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    factor: int
    decompose_both: bool
    seed: int
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """What `inject` creates, beside its rank, alpha, targets and name.

    ``network``       "lora", "loha" or "lokr", as LyCORIS names and initializes them; the last two not on embeddings
    ``dora``          train a magnitude for each output as well (DoRA)
    ``rslora``        scale by alpha / sqrt(rank) instead of alpha / rank
    ``dropout``       on the input of the adapter, during training
    ``hidden_dropout``  of the values between the two factors of a LoRA, up(dropout(down(x))): kohya's network_dropout
    ``rank_dropout``  the same for whole ranks of each row of the input; both not with DoRA
    ``rank_pattern``  {regular expression: rank} for some modules, as PEFT matches them; the first match wins
    ``alpha_pattern`` the same for alpha
    ``factor``        LoKr: the size of the small factor, where it divides; -1 splits each axis most evenly
    ``decompose_both``  LoKr: the small factor too is low-rank where that is smaller. Where both factors come out full,
                      alpha has nothing to be divided by and the scale is 1
    ``seed``          of the initial values, together with each module's name
    ``dtype``         of the new parameters; by default float32, or float64 where the base is
    """

    network: str = "lora"
    dora: bool = False
    rslora: bool = False
    dropout: float = 0.0
    hidden_dropout: float = 0.0
    rank_dropout: float = 0.0
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    factor: int = -1
    decompose_both: bool = False
    seed: int = 0
    dtype: torch.dtype | None = None

    def with_options(self, **options: Unpack[SpecOptions]) -> AdapterSpec:
        """The same with some fields replaced; `ConfigError` for a name that is no field."""
        known = [each.name for each in fields(self)]
        for name in options:
            if name not in known:
                near = get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise ConfigError(f"inject has no option {name!r}; {hint}")
        return replace(self, **options)
