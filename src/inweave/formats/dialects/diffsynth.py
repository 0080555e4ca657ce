"""DiffSynth's names: PEFT's suffixes with the adapter's name, under `pipe.dit.`."""

from __future__ import annotations

from inweave.formats.dialects.base import Dialect, Facts


class DiffSynth(Dialect):
    """DiffSynth-Studio's names (read-only)."""

    name = "diffsynth"
    description = "DiffSynth-Studio"
    dotted_prefixes = (("dit2.", "unet2"), ("dit.", "unet"), ("pipe.", ""))

    def claims(self, facts: Facts) -> str:
        return self.name if not facts.prefix and facts.has_adapter_name else super().claims(facts)


DIALECT = DiffSynth()
