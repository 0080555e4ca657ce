"""`AdapterSpec`: the options of a new adapter that rarely differ from their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import TypedDict, Unpack

import torch

from inweave.errors import ConfigError

#: the dropouts of an adapter, see `inweave.layers.dropout`; all but the first are behind its input
DROPOUTS = ("dropout", "hidden_dropout", "rank_dropout", "module_dropout", "output_dropout")


class SpecOptions(TypedDict, total=False):
    """The fields of an `AdapterSpec`, as keyword arguments."""

    network: str
    dora: bool
    rslora: bool
    dropout: float
    hidden_dropout: float
    rank_dropout: float
    module_dropout: float
    output_dropout: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    factor: int
    decompose_both: bool
    tucker: bool
    seed: int
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Options of a new adapter besides its rank, alpha, targets and name.

    Args:
        network: "lora", "loha" or "lokr", as named and initialized by LyCORIS; only "lora" supports embeddings.
        dora: also train a magnitude for each output (DoRA).
        rslora: scale by alpha / sqrt(rank) instead of alpha / rank.
        dropout: dropout of the adapter's input in training.
        hidden_dropout: dropout of the values between the two factors of a LoRA, up(dropout(down(x))): kohya's
            network_dropout; not with DoRA.
        rank_dropout: dropout of whole ranks of each row of the input; for LoHa and LoKr of outputs, which are not
            scaled; not with DoRA.
        module_dropout: probability of leaving the adapter of a module out for an example.
        output_dropout: probability of leaving out an output of a LoRA for an example, without scaling the others:
            LyCORIS' rank_dropout of LoCon and DoRA.
        rank_pattern: {regular expression: rank} for some modules, matched as in PEFT; the first match wins.
        alpha_pattern: {regular expression: alpha}, likewise.
        factor: for LoKr: the size of the small factor if it divides the axis; -1 splits each axis most evenly.
        decompose_both: for LoKr: also make the small factor low-rank if that is smaller. If both factors are full,
            there is no rank to divide alpha by, and the scale is 1.
        tucker: a core between the factors of convolutions wider than 1x1, as LyCORIS' use_tucker.
        seed: the seed of the initial values, combined with each module's name.
        dtype: dtype of the new parameters; None: float32, or float64 if the base is float64.
    """

    network: str = "lora"
    dora: bool = False
    rslora: bool = False
    dropout: float = 0.0
    hidden_dropout: float = 0.0
    rank_dropout: float = 0.0
    module_dropout: float = 0.0
    output_dropout: float = 0.0
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    factor: int = -1
    decompose_both: bool = False
    tucker: bool = False
    seed: int = 0
    dtype: torch.dtype | None = None

    def with_options(self, **options: Unpack[SpecOptions]) -> AdapterSpec:
        """Return a copy with some fields replaced; raise ConfigError for an unknown field."""
        known = [each.name for each in fields(self)]
        for name in options:
            if name not in known:
                near = get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise ConfigError(f"inject has no option {name!r}; {hint}")
        return replace(self, **options)
