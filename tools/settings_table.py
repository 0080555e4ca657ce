"""Renew the tables of settings and presets in docs/training.md: `python tools/settings_table.py`."""

from __future__ import annotations

from pathlib import Path

from inweave.training.config.reference import update_markdown

PAGE = Path(__file__).parents[1] / "docs" / "training.md"

if __name__ == "__main__":
    PAGE.write_text(update_markdown(PAGE.read_text("utf-8")), "utf-8")
