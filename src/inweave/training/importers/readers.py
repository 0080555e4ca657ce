"""Rows and steps that the importers of several trainers share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config import row
from inweave.training.config.aliases import min_snr as _min_snr
from inweave.training.config.translate import Translation
from inweave.training.config.values import parse_sizes
from inweave.training.importers.targets import FLOW

vae: Final = row.to("parts", lambda value: {"vae": value})


def _snr(out: Translation, name: str, value: Any) -> None:
    if out.family in FLOW:
        out.note(name, "is ignored for this model")
    else:
        _min_snr.read(out, name, value)


#: min-SNR weighting, which their trainers ignore for flow models
min_snr: Final = row.custom(_snr)


def implied_by(entries: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of settings that a file leaves out."""
    return {name: value for name, value in values.items() if entries.get(name) in (None, "")}


def entries_by_index(settings: Mapping[str, Any], prefix: str, depth: int = 1) -> dict[str, dict[str, Any]]:
    """Return {"0": {"path": ...}} for settings named "prefix.0.path"; ``depth``: names in the prefix."""
    entries: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name.startswith(f"{prefix}."):
            parts = name.split(".", depth + 1)
            index, key = parts[depth:] if len(parts) == depth + 2 else ("", "")
            entries.setdefault(index, {})[key] = value
    return entries


def drop_unused_samples(out: Translation) -> None:
    """Drop the intervals of samples that have no prompts."""
    if not out.fields.get("sample_prompts"):
        for name in ("sample_every", "sample_every_epochs"):
            out.fields.pop(name, None)


def refuse_hidden_dropout(out: Translation, name: str) -> None:
    """Refuse a dropout between the factors of an algorithm without one; trainers disagree on its meaning."""
    network = out.fields.get("network", "lora")
    if out.fields.get("hidden_dropout") and network not in ("lora", "locon"):
        value = for_message(out.fields.pop("hidden_dropout"))
        out.refuse(name, f"{value}: {network} has dropout on the adapter's inputs only", "dropout")


def parse_resolutions(value: Any) -> list[int]:
    """Return the sides of sizes that are trained together; a rectangle counts as the square of its area."""
    listed = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    sides = [parse_sizes(each) for each in listed]
    areas = dict.fromkeys(round(side[0] if len(side) == 1 else (side[0] * side[1]) ** 0.5) for side in sides)
    if not areas:
        raise ValueError("expected a size, got none")
    return sorted(areas)


def substring_patterns(values: Any) -> list[str]:
    """Return substrings of module names as patterns for whole names."""
    listed = [each for each in (values if isinstance(values, list) else [values]) if isinstance(each, str) and each]
    return [f".*{re.escape(each.removeprefix('transformer.'))}.*" for each in listed]
