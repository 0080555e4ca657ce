"""LyCORIS' names: kohya's suffixes and its own, under `lycoris_`."""

from __future__ import annotations

from inweave.formats.dialects.base import Dialect, ModuleKeys


class Lycoris(Dialect):
    """LyCORIS's names (read-only)."""

    name = "lycoris"
    description = "LyCORIS"
    flat_prefixes = (
        ("lycoris_te1_", "te1"), ("lycoris_te2_", "te2"), ("lycoris_te_", "te"), ("lycoris_unet_", "unet"),
        ("lycoris_", "unet"),
    )  # fmt: skip

    def claims(self, keys: ModuleKeys) -> str:
        under_kohya = keys.prefix == "kohya" and "lycoris" in keys.families
        return self.name if under_kohya else super().claims(keys)


DIALECT = Lycoris()
