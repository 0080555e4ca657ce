"""Defaults of other trainers, from `defaults.toml`, with the versions that they were read from."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


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
