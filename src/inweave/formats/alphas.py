"""Alphas that are stored outside the adapter file: the assumption, and the values that a caller may supply.

    PEFT          lora_alpha is in adapter_config.json; the tensors alone do not determine the scale
    candle-lora   the program passes alpha to `LoraConfig::new`; no file holds it

If alpha is missing, every loader assumes alpha = rank (scale 1), and so does this one, but always with a warning: a
file trained with alpha = rank / 2 would be applied at twice its strength. This does not apply to files of kohya,
diffusers and ComfyUI, in which a missing alpha means scale 1.

    supplied = alpha                           one number for all modules without an alpha
             | {rank: alpha, pattern: alpha}   by rank, or by a pattern as in PEFT's alpha_pattern, which takes
                                               precedence; a string of digits is a rank, and "*" matches all others
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from inweave.adapter import Entry
from inweave.errors import ConfigError
from inweave.formats.config import PeftConfig

#: an alpha for everything, or alphas by rank (whole numbers) and by pattern (text)
Alphas = float | Mapping[int | str, float] | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SuppliedAlphas:
    """Alphas supplied by the caller for modules without an alpha in the file."""

    default: float | None = None
    by_rank: Mapping[int, float] = field(default_factory=dict)
    by_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, alphas: Alphas) -> SuppliedAlphas:
        if not isinstance(alphas, Mapping):
            return cls(default=_positive(alphas, "alpha"))
        ranks: dict[int, float] = {}
        patterns: dict[str, float] = {}
        default: float | None = None
        for key, value in alphas.items():
            number = _positive(value, f"alpha of {key!r}")
            if key == "*":
                default = number
            elif isinstance(key, str) and key.isascii() and key.isdigit() and 0 < len(key) < 10:
                ranks[int(key)] = number
            elif isinstance(key, str) and key:
                patterns[key] = number
            elif isinstance(key, int) and not isinstance(key, bool) and key > 0:
                ranks[key] = number
            else:
                raise ConfigError(f"alpha: {key!r} is neither a rank nor a pattern of module names")
        return cls(default, ranks, patterns)

    def matches(self, module: str, rank: int) -> dict[object, float]:
        """Return {key: alpha} of the keys that match a module, the most specific first: pattern, rank, None for all."""
        chosen: dict[object, float] = {
            pattern: alpha
            for pattern, alpha in self.by_pattern.items()
            if PeftConfig(alpha_pattern={pattern: alpha}).alpha_of(module) is not None
        }
        if rank in self.by_rank:
            chosen[rank] = self.by_rank[rank]
        if self.default is not None:
            chosen[None] = self.default
        return chosen


def _positive(value: object, label: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30:
        return float(value)
    raise ConfigError(f"{label} must be a positive number, got {str(value)[:60]}")


def lacks_alpha(entry: Entry) -> bool:
    """Return whether this entry needs a scale that the file does not state."""
    factors = entry.factors
    return bool(factors.scale_rank) and factors.alpha is None and factors.stored_scale is None


def assumes_alpha(entry: Entry) -> bool:
    """Return whether the missing alpha is in a configuration or program that is not part of this adapter."""
    if not lacks_alpha(entry):
        return False
    bare = entry.dialect == "diffusers-peft" and not entry.ref.component
    return bare or entry.dialect in ("peft", "diffsynth", "candle")


def supply_alphas(entries: Iterable[Entry], supplied: SuppliedAlphas) -> list[Entry]:
    """Return the entries with their missing alphas; raise ConfigError for an alpha that no entry needs."""
    result: list[Entry] = []
    used: set[object] = set()
    lacking = 0
    for entry in entries:
        choices: dict[object, float] = {}
        if lacks_alpha(entry):
            lacking += 1
            choices = supplied.matches(entry.ref.name, entry.factors.scale_rank or 0)
            used.update(choices)
        alpha = next(iter(choices.values()), None)
        result.append(entry if alpha is None else replace(entry, factors=replace(entry.factors, alpha=alpha)))
    if not lacking:
        raise ConfigError("alpha: every module of this adapter states its own alpha, so none can be supplied")
    unused = [key for key in (*supplied.by_rank, *supplied.by_pattern) if key not in used]
    if unused:
        ranks = sorted({rank for entry in result if (rank := entry.factors.scale_rank)})
        raise ConfigError(
            f"alpha of {unused[0]!r}: no module without an alpha has this rank or name; ranks are {ranks}"
        )
    return result


def assumption_warnings(entries: Iterable[Entry]) -> list[str]:
    """Return warnings about assumed alphas, with advice on how to supply them."""
    counts: Counter[bool] = Counter()
    ranks: dict[bool, set[int]] = {}
    for entry in entries:
        if entry.factors.whole:
            continue
        candle = entry.dialect == "candle"
        counts[candle] += 1
        ranks.setdefault(candle, set()).add(entry.factors.scale_rank or 0)
    warnings = []
    for candle, count in counts.items():
        lowest, highest = min(ranks[candle]), max(ranks[candle])
        rank = f"rank {lowest}" if lowest == highest else f"ranks {lowest} to {highest}"
        cause = (
            "candle-lora files hold neither alpha nor rank scaling, which the program that made it knows"
            if candle
            else "PEFT keeps alpha in adapter_config.json, which this file came without"
        )
        warnings.append(
            f"{cause}: alpha = rank (scale 1) is assumed for {count} modules of {rank}; if it was trained with another "
            "alpha, its strength is wrong: supply it (--alpha, --rank-alpha, or alpha= in Python)"
        )
    return warnings
