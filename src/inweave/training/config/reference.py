"""Markdown tables of the settings, one per group, for `docs/training.md`."""

from __future__ import annotations

from typing import Any

from inweave.training.config.fields import TrainSettings, setting_facts
from inweave.training.config.presets import presets

BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"


def settings_markdown() -> str:
    """Return a heading and a table per group, in the order of the fields."""
    groups: dict[str, list[str]] = {}
    for name, field in TrainSettings.model_fields.items():
        default = "required" if field.is_required() else _text(field.default)
        row = f"| `{name}` | {default} | {field.description} |"
        groups.setdefault(setting_facts(name)["group"], []).append(row)
    tables = (
        "\n".join([f"### {group}", "", "| setting | default | description |", "|---|---|---|", *rows])
        for group, rows in groups.items()
    )
    return "\n\n".join(tables)


def presets_markdown() -> str:
    """Return a table of what each preset sets."""
    rows = (
        f"| `{family}` | {', '.join(f'{name} {_text(value)}' for name, value in preset.items())} |"
        for family, preset in presets().items()
    )
    return "\n".join(["### Presets", "", "| preset | sets |", "|---|---|", *rows])


def update_markdown(text: str) -> str:
    """Return a page with the tables between its two markers replaced."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{settings_markdown()}\n\n{presets_markdown()}\n\n{END}{tail}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, str):
        return f"`{value}`"
    return "" if value is None or value == {} else f"{value:g}"
