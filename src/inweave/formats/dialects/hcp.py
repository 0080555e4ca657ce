"""HCP-Diffusion's names: `<module>.___.layer.W_down`."""

from __future__ import annotations

from inweave.formats.dialects.base import Dialect, Facts


class Hcp(Dialect):
    """HCP-Diffusion's names (read-only)."""

    name = "hcp"
    description = "HCP-Diffusion"
    dotted_prefixes = (("clip_bigG.", "te2"), ("clip_B.", "te1"))

    def claims(self, facts: Facts) -> str:
        return self.name if self.name in facts.families else super().claims(facts)


DIALECT = Hcp()
