"""diffusers' names, and the older ones of its attention processors.

unet.|transformer.|text_encoder[_2].<diffusers module>.lora_A.weight, lora_B.weight
scaling other than 1 is in the metadata (`lora_adapter_metadata`)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from inweave.adapter import Adapter, Entry, Form
from inweave.formats.config import from_metadata
from inweave.formats.dialects.base import DIFFUSERS_CONFIG, Dialect, ModelNames, ModuleKeys, Written, alpha_record
from inweave.formats.dialects.peft_config import lora_config, lycoris_config, scales, still_describes


class Diffusers(Dialect):
    """diffusers' module names under the folders of its pipelines."""

    name = "diffusers"
    description = "diffusers' own files; diffusers"
    dotted_prefixes = (
        ("conditional_transformer.", "unet"), ("transformer_2.", "unet2"), ("transformer.", "unet"), ("unet.", "unet"),
        ("text_encoder_3.", "te3"), ("text_encoder_2.", "te2"), ("text_encoder.", "te1"),
    )  # fmt: skip
    form: ClassVar[Form | None] = Form("peft", widens=True, magnitude="lora_magnitude_vector.weight")
    holds_two_denoisers = True

    def claims(self, keys: ModuleKeys) -> str:
        if "processor" in keys.families:
            return "diffusers-attn-procs"
        if keys.prefix != self.name:
            return ""
        if "dotted" in keys.families:
            return "diffusers"
        return "onetrainer" if keys.families and "peft" not in keys.families else "diffusers-peft"

    def module(self, entry: Entry, names: ModelNames) -> str:
        if entry.ref.name.startswith("text_conditioner."):  # Anima's, a folder of its own
            return entry.ref.name
        return f"{_folder(entry.ref.component, names)}.{entry.ref.name}"

    def form_of(self, adapter: Adapter, names: ModelNames) -> Form:
        form = super().form_of(adapter, names)
        own = [entry.factors for entry in adapter.entries if names.family in entry.factors.diffusers_families]
        if not own:
            return form
        return replace(form, peft_type=own[0].kind.upper(), options=own[0].peft_options(own))

    def refusal(self, entry: Entry, names: ModelNames) -> str:
        families = entry.factors.diffusers_families
        if not families or (names.family in families and entry.ref.component == "unet"):
            return ""
        return f"diffusers reads {entry.factors.kind} for the transformers of {' and '.join(families)} only"

    def carries(self, key: str) -> bool:
        return False

    def finish(self, written: Written, entries: list[Entry], adapter: Adapter, names: ModelNames) -> None:
        form = self.form_of(adapter, names)
        stash = written.metadata.pop(DIFFUSERS_CONFIG, None)
        if stash is not None and still_describes(from_metadata({"lora_adapter_metadata": stash}), entries):
            written.metadata["lora_adapter_metadata"] = stash
        elif any(map(scales, entries)) or form.peft_type != "LORA":
            packed: dict[str, object] = {}
            for component in dict.fromkeys(entry.ref.component for entry in entries):
                own = [entry for entry in entries if entry.ref.component == component]
                fields = lora_config(own) if form.peft_type == "LORA" else lycoris_config(own, form.options)
                packed |= {f"{_folder(component, names)}.{name}": value for name, value in fields.items()}
            written.metadata["lora_adapter_metadata"] = json.dumps(packed, sort_keys=True, allow_nan=False)
        written.metadata |= alpha_record(entries)

    def notes(self, entries: Sequence[Entry], names: ModelNames) -> list[str]:
        notes = super().notes(entries, names)
        if names.denoiser == "unet":
            notes.append("ComfyUI does not find a UNet's attention under these names: for it write kohya or comfy")
        factors = sorted(
            {entry.factors.scale for entry in entries if entry.factors.scale_rank and entry.factors.scale != 1.0}
        )
        if factors:
            listed = ", ".join(f"{scale:g}" for scale in factors[:3]) + (", ..." if len(factors) > 3 else "")
            notes.append(
                f"the scale (alpha / rank = {listed}) is in the metadata alone, which diffusers reads; ComfyUI and "
                "others ignore it and apply the file at scale 1: for them write kohya or comfy"
            )
        return notes


def _folder(component: str, names: ModelNames) -> str:
    if component == "unet2":
        return "transformer_2"
    if not component.startswith("te"):
        return names.denoiser if names.denoiser != "model" else "unet"
    number = sorted(names.encoders).index(component) + 1 if component in names.encoders else 1
    return "text_encoder" if number == 1 else f"text_encoder_{number}"


DIALECT = Diffusers()
