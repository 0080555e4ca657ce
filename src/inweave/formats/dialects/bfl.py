"""BFL's own names for Flux adapters.

<original module>.lora_A.weight, lora_B.weight, lora_B.bias, <norm>.scale; no scaling at all
"""

from __future__ import annotations

from typing import ClassVar

from inweave.adapter import Adapter, Entry, Form
from inweave.formats.dialects.base import Dialect, ModelNames, ModuleKeys, Written, alpha_record

_ROOTS = (
    "double_blocks", "single_blocks", "img_in", "txt_in", "time_in", "vector_in", "guidance_in", "final_layer",
)  # fmt: skip


class Bfl(Dialect):
    """Flux modules under their original names, without a prefix."""

    name = "bfl"
    description = "BFL's own names, Flux only; BFL's code, ComfyUI and diffusers"
    form: ClassVar[Form | None] = Form("peft", norm_scales=True, widens=True)
    naming = "original"
    readers = (
        "these names are read by BFL's own code, and by ComfyUI and diffusers for Flux; for other programs write kohya"
    )

    def claims(self, keys: ModuleKeys) -> str:
        other = keys.prefix or keys.has_adapter_name or "candle" in keys.families
        return self.name if not other and keys.root in _ROOTS else ""

    def module(self, entry: Entry, names: ModelNames) -> str:
        return entry.ref.name

    def refusal(self, entry: Entry, names: ModelNames) -> str:
        factors = entry.factors
        if entry.ref.component != "unet" or names.family not in ("flux", "flux2"):
            return "BFL files hold Flux transformers only"
        if factors.peft_type and factors.alpha is not None and factors.scale != 1.0:
            return f"alpha {factors.alpha:g} scales it by {factors.scale:g}, and BFL files have no scaling"
        return ""

    def carries(self, key: str) -> bool:
        return False

    def finish(self, written: Written, entries: list[Entry], adapter: Adapter, names: ModelNames) -> None:
        written.metadata |= alpha_record(adapter.entries)


DIALECT = Bfl()
