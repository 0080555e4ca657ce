"""The configuration that defines a written adapter's scale: PEFT's fields, in diffusers' metadata or PEFT's
directories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from inweave.adapter import Entry, scale
from inweave.formats.config import PeftConfig


def scales(entry: Entry) -> bool:
    """Return whether an entry needs a configuration for its scale."""
    return bool(entry.factors.peft_rank) and entry.factors.scale != 1.0


def still_describes(configs: dict[str, PeftConfig], entries: Iterable[Entry]) -> bool:
    """Return whether a configuration preserved from an earlier conversion still defines every module's scale."""
    entries = list(entries)
    packed = packed_owners(entries)
    for entry in entries:
        factors = entry.factors
        config = configs.get(entry.ref.component) or configs.get("")
        if not factors.peft_rank:
            continue
        if config is None:
            return False
        owner, inner = entry.ref.name.rpartition(".")[0], is_inner(entry, packed)
        recorded = scale(config.alpha_of(owner if inner else entry.ref.name), factors.peft_rank, rslora=config.rslora)
        recorded *= 2 if inner == "out_proj" else 1
        if abs(recorded - factors.scale) > 1e-6 * abs(factors.scale):
            return False
    return True


def patterns(entries: Iterable[Entry], *, rslora: bool = False) -> dict[str, object]:
    """Return r, lora_alpha and the exceptions, read with or without rs-LoRA; alpha = rank if the file had none."""
    entries = list(entries)
    packed = packed_owners(entries)
    rows = {
        e.ref.name.rpartition(".")[0] if is_inner(e, packed) else config_name(e): e.factors
        for e in entries
        if e.factors.peft_rank and is_inner(e, packed) != "out_proj"  # it has the rank and alpha of in_proj
    }
    ranks = {name: f.peft_rank or 0 for name, f in rows.items()}
    alphas = {
        name: f.alpha
        if f.alpha and f.rslora == rslora and f.scale_rank == ranks[name]
        else f.scale * (ranks[name] ** 0.5 if rslora else ranks[name])
        for name, f in rows.items()
    }
    rank = Counter(ranks.values()).most_common(1)[0][0] if ranks else 0
    alpha = Counter(alphas.values()).most_common(1)[0][0] if alphas else 0.0
    return {
        "r": rank,
        "lora_alpha": _whole(alpha),
        "rank_pattern": {_anchored(n, rows): r for n, r in ranks.items() if r != rank},
        "alpha_pattern": {_anchored(n, rows): _whole(a) for n, a in alphas.items() if a != alpha},
    }


def config_name(entry: Entry) -> str:
    """Return a module's path for patterns, which match its end; in memory text encoders have no `text_model.`."""
    encoder = entry.ref.component.startswith("te")
    return entry.ref.name.removeprefix("text_model.") if encoder else entry.ref.name


def packed_owners(entries: Iterable[Entry]) -> set[str]:
    """Return the modules with LoRA on their packed projection: torch's MultiheadAttention, one module for PEFT."""
    names = (entry.ref.name for entry in entries if entry.factors.peft_type == "LORA" and entry.param == "weight")
    return {name.removesuffix(".in_proj") for name in names if name.endswith(".in_proj")}


def is_inner(entry: Entry, packed: Collection[str]) -> str:
    """Return "in_proj" or "out_proj" for those weights of a module with a packed projection, else an empty text."""
    owner, _, leaf = entry.ref.name.rpartition(".")
    return leaf if leaf in ("in_proj", "out_proj") and owner in packed else ""


def packed_problem(entry: Entry, entries: Iterable[Entry]) -> str:
    """Return why PEFT's MultiheadAttention cannot hold an entry, or an empty text.

    PEFT (to 0.21) has one rank and alpha for both projections, and adds the change of out_proj twice.
    """
    entries = list(entries)
    if is_inner(entry, packed_owners(entries)) != "out_proj":
        return ""
    name = f"{entry.ref.name.removesuffix('.out_proj')}.in_proj"
    own, first = entry.factors, next(e.factors for e in entries if e.ref.name == name)
    if own.rank == first.rank and abs(own.scale - 2 * first.scale) <= 1e-6 * abs(own.scale):
        return ""
    return "PEFT has one rank for both projections of a MultiheadAttention, and adds the change of out_proj twice"


def _target_modules(loras: list[Entry]) -> set[str]:
    """Return the modules that take LoRA: a MultiheadAttention as one, and none for bare parameters."""
    packed = packed_owners(loras)
    return packed | {config_name(e) for e in loras if not e.factors.of_parameter and not is_inner(e, packed)}


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def _anchored(name: str, names: Iterable[str]) -> str:
    """Return the pattern of a name, anchored if a longer path ends with it."""
    return f"^{name}" if any(other.endswith(f".{name}") for other in names) else name


def lora_config(entries: list[Entry]) -> dict[str, object]:
    """Return the PEFT fields that define the scale of these entries."""
    loras = [entry for entry in entries if entry.factors.peft_type == "LORA"]
    rslora = any(entry.factors.rslora for entry in loras)
    return {
        **patterns(loras, rslora=rslora),
        "target_modules": sorted(_target_modules(loras)),
        "use_rslora": rslora,
        "use_dora": any(entry.factors.magnitude is not None for entry in loras),
        "lora_bias": any(e.factors.whole and e.factors.scale_rank is not None for e in entries),
        "bias": "none",
    }


def lycoris_config(entries: list[Entry], options: Mapping[str, object]) -> dict[str, object]:
    """Return PEFT's fields of LoHa and LoKr, whose alphas have other names than LoRA's."""
    fields = patterns(entries)
    return {
        "r": fields["r"],
        "alpha": fields["lora_alpha"],
        "rank_pattern": fields["rank_pattern"],
        "alpha_pattern": fields["alpha_pattern"],
        "target_modules": sorted({entry.ref.name for entry in entries}),
        **options,
    }
