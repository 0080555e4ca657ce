"""HCP-Diffusion's names: `<module>.___.layer.W_down`."""

from __future__ import annotations

from inweave.formats.dialects.base import Dialect, ModuleKeys


class Hcp(Dialect):
    """HCP-Diffusion's names (read-only)."""

    name = "hcp"
    description = "HCP-Diffusion"
    dotted_prefixes = (("clip_bigG.", "te2"), ("clip_B.", "te1"))

    def claims(self, keys: ModuleKeys) -> str:
        return self.name if self.name in keys.families else super().claims(keys)


DIALECT = Hcp()
