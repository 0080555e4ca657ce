"""Training options for the page: settings with per-model defaults, and presets scaled from them.

preset      steps, of the default        rank, of the default
quick       a quarter                    the same
subject     three quarters               the same; captions are never left out, so that the trigger word is learned
style       all                          the same
thorough    twice as many                twice

Every preset saves and samples five times on the way.
"""

from __future__ import annotations

from typing import Any

from inweave.models.families import families
from inweave.models.variants import find_variant
from inweave.serve.service.training import RESERVED
from inweave.training.config.fields import setting_facts
from inweave.training.config.presets import presets
from inweave.training.config.schema import TrainConfig

_PURPOSES: dict[str, tuple[str, float, float, dict[str, Any]]] = {
    "style": ("a style: how things are drawn", 1.0, 1.0, {}),
    "subject": ("a person, a character or a thing, called by its trigger word", 0.75, 1.0, {"caption_dropout": 0.0}),
    "quick": ("a first look, in a quarter of the time", 0.25, 1.0, {}),
    "thorough": ("more to learn: twice the steps, twice the rank", 2.0, 2.0, {}),
}
SAVES = 5


def own_settings(base: str | None) -> dict[str, Any]:
    """Return the trainer's defaults for a base."""
    name = base if base in presets() else None
    if name is None and base is not None and (variant := find_variant(base)) is not None:
        family = next(family for family in families() if variant in family.variants)
        name = variant.name if variant.name in family.presets else family.name
    return dict(presets().get(name or "", {}))


def purposes(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the presets: settings that differ from the defaults."""
    rows = []
    for name, (description, length, size, more) in _PURPOSES.items():
        steps = max(round(own.get("steps", 2000) * length), SAVES)
        rank = round(own.get("rank", 16) * size)
        every = -(-steps // SAVES)
        settings = {"steps": steps, "rank": rank, "save_every": every, "sample_every": every, **more}
        rows.append({"name": name, "description": description, "settings": settings})
    return rows


def setting_table(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every setting of a request, with its schema, description and default."""
    properties: dict[str, Any] = TrainConfig.model_json_schema()["properties"]
    table = []
    for name, schema in properties.items():
        if name not in RESERVED:
            limits = {
                key: value for key, value in schema.items() if key in ("type", "enum", "anyOf", "minimum", "maximum")
            }
            table.append({
                "name": name, "group": setting_facts(name)["group"], "description": schema.get("description", ""),
                "default": own.get(name, schema.get("default")), "schema": limits,
            })  # fmt: skip
    return table
