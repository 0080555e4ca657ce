"""OneTrainer's names: kohya's with other prefixes, for a few algorithms.

lora_unet_|lora_transformer_<flat>; the T5 of Flux is lora_te2_
"""

from __future__ import annotations

from typing import ClassVar

from inweave.adapter import Entry
from inweave.formats.dialects.base import Dialect, ModelNames, Naming
from inweave.formats.dialects.kohya import Kohya

_ALGORITHMS = ("lora", "loha", "lokr", "oft_in", "full")


class OneTrainer(Kohya):
    """kohya's names with `lora_transformer_`."""

    name = "onetrainer"
    description = "OneTrainer; ComfyUI"
    flat_prefixes = (("lora_transformer_2_", "unet2"), ("lora_transformer_", "unet"))
    dotted_prefixes = (("clip_l.", "te1"), ("clip_g.", "te2"), ("t5.", "te3"))
    naming: ClassVar[Naming] = "diffusers"
    claims = Dialect.claims

    def refusal(self, entry: Entry, names: ModelNames) -> str:
        return "" if entry.factors.kind in _ALGORITHMS else f"OneTrainer has no {entry.factors.kind}"

    def prefix(self, component: str, names: ModelNames) -> str:
        if not component.startswith("te"):
            return "lora_transformer_" if names.denoiser == "transformer" else "lora_unet_"
        return f"lora_{component}_" if len(names.encoders) > 1 or names.family == "flux" else "lora_te_"


DIALECT = OneTrainer()
