"""DiffSynth's names: PEFT's suffixes with the adapter's name, under `pipe.dit.`."""

from __future__ import annotations

from inweave.formats.dialects.base import Dialect, ModuleKeys


class DiffSynth(Dialect):
    """DiffSynth-Studio's names (read-only)."""

    name = "diffsynth"
    description = "DiffSynth-Studio"
    dotted_prefixes = (("dit2.", "unet2"), ("dit.", "unet"), ("pipe.", ""))

    def claims(self, keys: ModuleKeys) -> str:
        return self.name if not keys.prefix and keys.has_adapter_name else super().claims(keys)


DIALECT = DiffSynth()
