"""The scaling of each module, from a file's metadata or adapter_config.json.

    adapter_config.json        PEFT: alpha, rank patterns, rs-LoRA, fan_in_fan_out, OFT and (IA)^3 options
    lora_adapter_metadata      diffusers: the same fields, packed as "<component>.<field>" in one JSON
    ss_network_dim / _args     kohya and LyCORIS: rs_lora and split_qkv, the dimension of a full LoKr

A pattern key matches a module if the regular expression `(.*\\.)?(key)$` matches its path; the first
match wins, as in PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

from inweave.adapter.components import FOLDERS
from inweave.adapter.contract import SERIES_TERMS, PeftSettings
from inweave.errors import FormatError
from inweave.files.documents import parse_json
from inweave.formats.peft_fields import check_fields, token_indices
from inweave.patterns import PatternTable, regex

Value = TypeVar("Value", int, float)

_MOST_TERMS = 100  # each costs a product of all blocks, and after 20 nothing changes
_MOST_RANK = 1 << 20
SUPPORTED = ("LORA", "LOHA", "LOKR", "OFT", "BOFT", "IA3", "VERA")


@dataclass(frozen=True, slots=True)
class PeftConfig(PeftSettings):
    """The fields of a PEFT configuration that change how its tensors are read."""

    rank: int | None = None
    alpha: float | None = None
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False
    lora_bias: bool = False
    feedforward: frozenset[str] | str = frozenset()
    target_parameters: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    _tables: dict[str, PatternTable] = field(default_factory=dict, compare=False, repr=False)

    def alpha_of(self, module: str) -> float | None:
        """Return the alpha of a module."""
        return self._first_match("alpha_pattern", self.alpha_pattern, module, self.alpha)

    def rank_of(self, module: str) -> int | None:
        return self._first_match("rank_pattern", self.rank_pattern, module, self.rank)

    def is_feedforward(self, module: str) -> bool:
        if isinstance(self.feedforward, str):
            return regex(self.feedforward, "adapter_config.json: feedforward_modules", FormatError).fullmatch(module)
        return not self.feedforward.isdisjoint(ends(module))

    def tokens_of(self, module: str) -> tuple[int, ...] | None:
        return next((self.token_indices[n] for n in (*ends(module), "") if n in self.token_indices), None)

    def saves(self, module: str) -> bool:
        parts = module.split(".")[-12:]  # modules inside a listed one are saved with it
        runs = (".".join(parts[a:b]) for a in range(len(parts)) for b in range(a + 1, len(parts) + 1))
        return not set(self.modules_to_save).isdisjoint(runs)

    def parameters_of(self, module: str, rows: int) -> list[str]:
        """Return the bare parameters that factors under this name may be for; ``rows``: the ranks of all experts.

        PEFT nests the wrappers of several parameters of one module in the order in which the module has them, and names
        none of them: `experts.base_layer` is the first of two, gate_up_proj, and `experts` the last, down_proj. Only
        the model knows that order; the one here is that of most models, with the projection of the outputs last.
        """
        name, depth = unnested(module)
        places = set(ends(name))
        names: dict[str, None] = {}
        for target in self.target_parameters:
            owner, _, leaf = target.rpartition(".")
            if owner in places or (not owner and (depth or rows != self.rank_of(f"{name}.{leaf}"))):
                names.setdefault(leaf)
        return sorted(names, key=lambda leaf: "down" in leaf or leaf.startswith(("w2", "output")))

    def _first_match(
        self, field: str, patterns: Mapping[str, Value], module: str, default: Value | None
    ) -> Value | None:
        if not patterns:
            return default
        if (table := self._tables.get(field)) is None:
            label = f"adapter_config.json: {field}"
            table = self._tables[field] = PatternTable(tuple(patterns), label, FormatError)
        position = table.first(module)
        return default if position is None else patterns[table.patterns[position]]


def unnested(module: str) -> tuple[str, int]:
    """Return a module's name without the wrappers of PEFT around it, and how many there were."""
    name = module
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return name, (len(module) - len(name)) // len(".base_layer")


def ends(module: str) -> list[str]:
    """Return a dotted name and each of its suffixes after a dot: the names that PEFT's lists may use for it."""
    return [module, *(module[place + 1 :] for place, letter in enumerate(module) if letter == ".")]


def from_adapter_config(config: Mapping[str, object]) -> PeftConfig:
    """Read an adapter_config.json; raise FormatError for settings that cannot be applied to a model's tensors."""
    kind = str(config.get("peft_type") or "LORA").upper().rpartition(".")[2]
    if kind not in SUPPORTED:
        raise FormatError(f"adapter_config.json: peft_type {kind} is not supported; known are {', '.join(SUPPORTED)}")
    warnings = check_fields(config)
    alpha_field = "lora_alpha" if kind == "LORA" else "alpha"
    alpha = config.get(alpha_field)
    if kind in ("LORA", "LOHA", "LOKR") and not _is_finite(alpha):
        raise FormatError(
            f"adapter_config.json: {alpha_field} is missing or not a number ({alpha!r}), "
            "so the scale is unknown; add it"
        )
    terms = config.get("num_cayley_neumann_terms", SERIES_TERMS)
    if type(terms) is int and not 0 < terms <= _MOST_TERMS:
        raise FormatError(f"adapter_config.json: num_cayley_neumann_terms must be 1 to {_MOST_TERMS}, not {terms}")
    feedforward = config.get("feedforward_modules") or ()
    if not isinstance(feedforward, str):
        feedforward = frozenset(_names(config, "feedforward_modules"))
    return PeftConfig(
        peft_type=kind,
        rank=_integer(config, "r"),
        alpha=float(cast("float", alpha)) if _is_finite(alpha) else None,
        alpha_pattern=_numbers(config, "alpha_pattern"),
        rank_pattern=_ranks(config),
        rslora=_flag(config, "use_rslora"),
        dora=_flag(config, "use_dora"),
        lora_bias=_flag(config, "lora_bias"),
        fan_in_fan_out=_flag(config, "fan_in_fan_out"),
        feedforward=feedforward,
        block_share=_flag(config, "block_share"),
        neumann_terms=terms if _flag(config, "use_cayley_neumann", True) and type(terms) is int else None,
        constrained=_flag(config, "coft"),
        target_parameters=_names(config, "target_parameters"),
        modules_to_save=_names(config, "modules_to_save"),
        token_indices=token_indices(config),
        warnings=tuple(warnings),
    )


def from_metadata(metadata: Mapping[str, str]) -> dict[str, PeftConfig]:
    """Return the configuration of each component from diffusers' `lora_adapter_metadata`; empty if there is none."""
    packed = json_object(metadata.get("lora_adapter_metadata"))
    grouped: dict[str, dict[str, object]] = {}
    for key, value in packed.items():
        component, _, name = key.partition(".")
        if component in FOLDERS and name:
            grouped.setdefault(FOLDERS[component], {})[name] = value
        elif not name:  # saved from one model instead of a pipeline
            grouped.setdefault("", {})[key] = value
    return {
        component: from_adapter_config({"peft_type": "LORA" if "lora_alpha" in fields else "LOKR", **fields})
        for component, fields in grouped.items()
        if "lora_alpha" in fields or {"alpha", "decompose_factor"} <= fields.keys()
    }


def network_args(metadata: Mapping[str, str]) -> dict[str, object]:
    return json_object(metadata.get("ss_network_args"))


def is_true(value: object) -> bool:
    return value is True or str(value).strip().lower() in ("true", "1")


def json_object(text: str | None) -> dict[str, object]:
    """Return the JSON object in a metadata value; empty for anything else."""
    if not text:
        return {}
    try:
        document = parse_json(text, "metadata")
    except FormatError:
        return {}
    return document if isinstance(document, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    """Return whether a value is a number within the range of floats."""
    return _is_number(value) and abs(cast("float", value)) < 1e30


def _names(config: Mapping[str, object], name: str) -> tuple[str, ...]:
    names = config.get(name) or ()
    if not isinstance(names, list | tuple):
        raise FormatError(f"adapter_config.json: {name} must be a list of names, not {str(names)[:60]!r}")
    return tuple(map(str, names))


def _flag(config: Mapping[str, object], name: str, default: bool = False) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if value not in (True, False):
        raise FormatError(f"adapter_config.json: {name} must be true or false, not {str(value)[:60]!r}")
    return bool(value)


def _ranks(config: Mapping[str, object]) -> dict[str, int]:
    ranks = _numbers(config, "rank_pattern")
    if wrong := [rank for rank in ranks.values() if not 1 <= rank <= _MOST_RANK or rank != int(rank)]:
        raise FormatError(f"adapter_config.json: rank_pattern must map patterns to whole numbers, not {wrong[0]!r}")
    return {pattern: int(rank) for pattern, rank in ranks.items()}


def _integer(config: Mapping[str, object], name: str) -> int | None:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if not 0 <= value <= _MOST_RANK:
        raise FormatError(f"adapter_config.json: {name} must be 0 to {_MOST_RANK}, not {str(value)[:30]}")
    return value


def _numbers(config: Mapping[str, object], name: str) -> dict[str, float]:
    numbers = config.get(name) or {}
    if not isinstance(numbers, dict) or not all(_is_finite(value) for value in numbers.values()):
        raise FormatError(f"adapter_config.json: {name} must map patterns to numbers")
    return numbers
