"""Restore the form that alphas had before a conversion to a dialect that stores only numbers.

The record (`inweave.alpha` in the metadata) states, for all modules with exceptions, either that there was no alpha or
the dtype and shape of its tensor. It is used only if it agrees with the scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from inweave.adapter import Entry, scalar
from inweave.formats.config import json_object
from inweave.formats.dialects.base import CANDLE_ALPHA, STORED_ALPHA


def restore_alphas(entries: list[Entry], metadata: Mapping[str, str], assumed: Iterable[Entry] = ()) -> list[Entry]:
    """Return the entries with alphas as stored before the last conversion; ``assumed`` entries stay without one."""
    record = json_object(metadata.get(STORED_ALPHA))
    if not record:
        return entries
    exceptions = {name.partition(":")[2]: form for name, form in record.items() if name}
    unknown = {id(entry) for entry in assumed}
    return [entry if id(entry) in unknown else _restored(entry, record, exceptions) for entry in entries]


def candle_alphas(entries: list[Entry], metadata: Mapping[str, str]) -> list[Entry]:
    """Return the entries of a candle-lora file that inweave wrote, with the alpha it was written for."""
    alpha = _number(metadata.get(CANDLE_ALPHA))
    if alpha is None:
        return entries
    return [
        replace(entry, factors=replace(entry.factors, alpha=alpha))
        if entry.dialect == "candle" and entry.factors.scale_rank and entry.factors.stored_alpha is None
        else entry
        for entry in entries
    ]


def _restored(entry: Entry, record: Mapping[str, object], by_name: Mapping[str, object]) -> Entry:
    factors = entry.factors
    if factors.whole or factors.stored_alpha is not None:
        return entry
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
                return entry
            return replace(entry, factors=replace(factors, alpha=float(alpha), stored_alpha=stored))
    return entry


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text else None
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None
