"""Giving alphas back the form they had before a dialect that keeps only numbers.

The record (`inweave.alpha` in the metadata) says, for all modules and for exceptions: no alpha at all, or
the dtype and shape of the tensor it was stored in. It is believed only where it agrees with the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from inweave.adapter import Entry, Full, Lora, scalar
from inweave.formats.config import json_object
from inweave.formats.spell import CANDLE_ALPHA, STORED_ALPHA


def restore_alphas(entries: list[Entry], metadata: Mapping[str, str]) -> list[Entry]:
    """The entries with alphas as they were stored before the last conversion."""
    record = json_object(metadata.get(STORED_ALPHA))
    candle = _number(metadata.get(CANDLE_ALPHA))
    if not record and candle is None:
        return entries
    exceptions = {name.partition(":")[2]: form for name, form in record.items() if name}
    return [_restored(entry, record, exceptions, candle) for entry in entries]


def _restored(entry: Entry, record: Mapping[str, object], by_name: Mapping[str, object], candle: float | None) -> Entry:
    factors = entry.factors
    if isinstance(factors, Full) or factors.stored_alpha is not None:
        return entry
    if candle is not None and entry.dialect == "candle" and isinstance(factors, Lora):
        factors = replace(factors, alpha=candle)
    name = f"{entry.ref.component}:{entry.ref.name}"
    form = record.get(name, by_name.get(entry.ref.name, record.get("", ["", []])))
    if form is None:
        return replace(entry, factors=replace(factors, alpha=None)) if factors.scale == 1.0 else entry
    alpha = factors.alpha if factors.alpha is not None else factors.rank
    match form:
        case [str(dtype), list(shape)] if dtype and alpha is not None:
            try:
                stored = scalar(alpha, dtype, tuple(int(size) for size in shape))
            except (ValueError, KeyError, TypeError, OverflowError):
                return replace(entry, factors=factors)
            return replace(entry, factors=replace(factors, alpha=float(alpha), stored_alpha=stored))
    return replace(entry, factors=factors)


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
