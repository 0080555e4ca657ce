"""Alphas that a file leaves to somebody else: what is assumed, and what a caller may supply.

    PEFT          lora_alpha is in adapter_config.json; the tensors alone do not tell the scale
    candle-lora   the program passes alpha to `LoraConfig::new`; no file holds it

Where it is missing, every loader takes alpha = rank (scale 1), and so does this one, but never without a warning:
trained with alpha = rank / 2, such a file would be applied twice as strongly as it was trained. Files of kohya, diffusers
and ComfyUI without alphas are no such case: there a missing alpha is the format's way to write scale 1.

    supplied = alpha                           one number for all modules that have none
             | {rank: alpha, pattern: alpha}   by rank, or by a pattern as in PEFT's alpha_pattern, which goes first;
                                               text of digits alone is a rank, and "*" stands for all others
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
    """Alphas that a caller supplies for modules whose file has none."""

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
        """What names this module, the most specific first: a pattern, a rank, or None for the alpha of all."""
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
    """Whether a scale belongs to this entry and the file does not state it."""
    factors = entry.factors
    return bool(factors.scale_rank) and factors.alpha is None and factors.stored_scale is None


def assumes_alpha(entry: Entry) -> bool:
    """Whether the missing alpha is in a file or program that this adapter came without."""
    if not lacks_alpha(entry):
        return False
    bare = entry.dialect == "diffusers-peft" and not entry.ref.component
    return bare or entry.dialect in ("peft", "diffsynth", "candle")


def supply_alphas(entries: Iterable[Entry], supplied: SuppliedAlphas) -> list[Entry]:
    """The entries with the alphas they lack; an alpha that nothing needs is an error, never ignored."""
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
    """What is assumed for entries whose alpha is elsewhere, and how to supply it."""
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
