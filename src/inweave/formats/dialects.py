"""Names of dialects: what the prefixes and suffixes of a group are called by the people who use them.

A name is a label for reports, never a switch: nothing downstream behaves differently because of it.
"""

from __future__ import annotations

from inweave.adapter import Ref

_BY_FAMILY = {"cloneofsimo": "cloneofsimo", "xlabs": "xlabs", "hcp": "hcp", "processor": "diffusers-attn-procs"}
_BFL_ROOTS = (
    "double_blocks.",
    "single_blocks.",
    "img_in",
    "txt_in",
    "time_in",
    "vector_in",
    "guidance_in",
    "final_layer.",
)


def dialect_of(prefix: str, families: set[str], ref: Ref, has_adapter_name: bool) -> str:
    for family, name in _BY_FAMILY.items():
        if family in families:
            return name
    if "candle" in families and not prefix:
        return "candle"
    if prefix == "kohya":
        return "lycoris" if "lycoris" in families else "kohya"
    if prefix in ("lycoris", "onetrainer", "comfy", "peft", "hcp", "diffsynth"):
        return prefix
    if prefix == "diffusers":
        if "dotted" in families:
            return "diffusers"
        return "onetrainer" if families and "peft" not in families else "diffusers-peft"
    if has_adapter_name:
        return "diffsynth"
    if ref.name.startswith(_BFL_ROOTS):
        return "bfl"
    if "dotted" in families or "peft" in families:
        return "diffusers" if "dotted" in families else "diffusers-peft"
    return "bare"
