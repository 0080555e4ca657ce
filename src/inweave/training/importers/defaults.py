"""Facts about other trainers, as data: their defaults, and the settings that need no code.

defaults.toml              the defaults of all, with the versions that they were read from
<trainer>/settings.toml    [renamed]: theirs = "ours"; [[ignored]], [[refused]] and [[different]]: names, why (a
                           sentence, or the name of one in `row`), and neutral, the values that ask for nothing
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from inweave.training.config import row
from inweave.training.config.translate import SettingRow


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files(__package__).joinpath("defaults.toml").read_text("utf-8"))


def defaults(trainer: str, *sections: str) -> dict[str, Any]:
    """Return sections of a trainer's defaults; later ones override earlier ones."""
    merged: dict[str, Any] = {}
    for section in sections:
        table: Any = _tables()[trainer]
        for part in section.split("."):
            table = table.get(part, {})
        merged |= table
    return merged


def trainers() -> dict[str, str]:
    """Return every trainer with a table, and its version."""
    return {name: str(table["version"]) for name, table in _tables().items()}


def setting_rows(trainer: str) -> dict[str, SettingRow]:
    """Return the rows of a trainer's `settings.toml`."""
    table = tomllib.loads(files(__package__).joinpath(trainer, "settings.toml").read_text("utf-8"))
    rows = row.renamed(table["renamed"])
    for kind in ("ignored", "refused", "different"):
        for group in table.get(kind, ()):
            why, neutral = getattr(row, group["why"], group["why"]), tuple(group.get("neutral", ()))
            rows |= row.each(SettingRow(kind, why, neutral=neutral), group["names"])
    return rows
