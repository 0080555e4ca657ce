"""XLabs' names for Flux adapters: `...processor.qkv_lora1.down.weight`."""

from __future__ import annotations

from inweave.formats.dialects.base import Dialect, ModuleKeys


class XLabs(Dialect):
    """XLabs's names (read-only)."""

    name = "xlabs"
    description = "XLabs"

    def claims(self, keys: ModuleKeys) -> str:
        return self.name if self.name in keys.families else ""


DIALECT = XLabs()
