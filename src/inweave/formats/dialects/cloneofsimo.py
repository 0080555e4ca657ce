"""cloneofsimo's names: layers are numbered, `unet:0:up`."""

from __future__ import annotations

from inweave.formats.dialects.base import Dialect, ModuleKeys


class CloneOfSimo(Dialect):
    """cloneofsimo/lora's names (read-only)."""

    name = "cloneofsimo"
    description = "cloneofsimo/lora"

    def claims(self, keys: ModuleKeys) -> str:
        return self.name if self.name in keys.families else ""


DIALECT = CloneOfSimo()
