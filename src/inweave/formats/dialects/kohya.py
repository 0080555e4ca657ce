"""kohya's names, which most programs read.

    lora_unet_<flat> lora_te_<flat>|lora_te1_.. + lora_down.weight lora_up.weight alpha

Numbered OFT parts keep kohya's `oft_unet_<flat>.oft_blocks.<i>`.
"""

from __future__ import annotations

from typing import ClassVar

from inweave.adapter import Entry, Form
from inweave.formats.dialects.base import Dialect, ModelNames, ModuleKeys, Naming


class Kohya(Dialect):
    """Flat names and the suffixes of kohya's family."""

    name = "kohya"
    description = "sd-scripts; A1111, Forge and ComfyUI"
    flat_prefixes: ClassVar[tuple[tuple[str, str], ...]] = (
        ("lora_te_wrapped_transformer_", "te"), ("lora_prior_unet_", "unet"), ("lora_prior_te_", "te"),
        ("lora_unet_unet_", "unet"), ("lora_unet__", "unet"), ("lora_unet_", "unet"),
        ("lora_te1_", "te1"), ("lora_te2_", "te2"), ("lora_te3_", "te3"), ("lora_te_", "te"),
        ("oft_unet_", "unet"), ("oft_te1_", "te1"), ("oft_te2_", "te2"), ("oft_te_", "te"),
    )  # fmt: skip
    form: ClassVar[Form | None] = Form("kohya", norms=True, rotates_inputs=True)
    naming: ClassVar[Naming] = "trained"

    def claims(self, keys: ModuleKeys) -> str:
        return "" if "lycoris" in keys.families else super().claims(keys)

    def module(self, entry: Entry, names: ModelNames) -> str:
        prefix = self.prefix(entry.ref.component, names)
        if entry.ref.part is not None:
            prefix = prefix.replace("lora_", "oft_", 1)
        return prefix + entry.ref.name.replace(".", "_")

    def suffix(self, entry: Entry, suffix: str) -> str:
        numbered = entry.ref.part is not None and suffix == "oft_blocks"
        return f"oft_blocks.{entry.ref.part}" if numbered else suffix

    def prefix(self, component: str, names: ModelNames) -> str:
        """Return the prefix of a component."""
        if not component.startswith("te"):
            return "lora_unet_"
        if names.encoders.get(component) == "t5xxl" and len(names.encoders) > 1:
            return "lora_te3_"
        return f"lora_{component}_" if len(names.encoders) > 1 or names.family == "flux" else "lora_te_"


DIALECT = Kohya()
