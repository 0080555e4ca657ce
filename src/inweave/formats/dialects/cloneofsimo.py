"""cloneofsimo's names: layers are numbered, `unet:0:up`."""

from __future__ import annotations

from inweave.formats.dialects.base import Dialect, Facts


class CloneOfSimo(Dialect):
    """cloneofsimo/lora's names (read-only)."""

    name = "cloneofsimo"
    description = "cloneofsimo/lora"

    def claims(self, facts: Facts) -> str:
        return self.name if self.name in facts.families else ""


DIALECT = CloneOfSimo()
