"""ComfyUI's generic names: dotted names of the original model, kohya's suffixes.

diffusion_model.<original module>.lora_down.weight | lora_up.weight | alpha | diff | diff_b | set_weight
text_encoders.<clip_l|clip_g|clip_h|t5xxl>.transformer.<module>....
"""

from __future__ import annotations

from typing import ClassVar

from inweave.adapter import Entry, Form
from inweave.formats.dialects.base import Dialect, ModelNames

_ENCODERS = {"clip_l": "te1", "clip_g": "te2", "clip_h": "te1", "t5xxl": "te3", "qwen3_06b": "te", "qwen3_4b": "te"}


class Comfy(Dialect):
    """Original dotted names under ComfyUI's prefixes."""

    name = "comfy"
    description = "ComfyUI's generic names; ComfyUI and Forge"
    dotted_prefixes = (
        ("model.diffusion_model.", "unet"),
        ("diffusion_model.", "unet"),
        *((f"text_encoders.{encoder}.transformer.", component) for encoder, component in _ENCODERS.items()),
    )
    form: ClassVar[Form | None] = Form("kohya", replaces=True, widens=True)
    naming = "original"
    comfy_names = True

    def refusal(self, entry: Entry, names: ModelNames) -> str:
        numbered = entry.ref.part is not None
        return "OFT blocks of one part of a fused module cannot be expressed in this dialect" if numbered else ""

    def module(self, entry: Entry, names: ModelNames) -> str:
        component = entry.ref.component
        if not component.startswith("te"):
            return f"diffusion_model.{entry.ref.name}"
        return f"text_encoders.{names.encoders.get(component, 'clip_l')}.transformer.{entry.ref.name}"

    def suffix(self, entry: Entry, suffix: str) -> str:
        return "scale" if entry.param == "scale" else suffix


DIALECT = Comfy()
