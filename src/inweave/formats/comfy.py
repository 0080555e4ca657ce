"""ComfyUI's generic spelling: dotted names of the original model, kohya's suffixes.

diffusion_model.<original module>.lora_down.weight | lora_up.weight | alpha | diff | diff_b | set_weight
text_encoders.<clip_l|clip_g|clip_h|t5xxl>.transformer.<module>....
"""

from __future__ import annotations

from inweave.adapter import Adapter, Entry
from inweave.formats.spell import Lost, Target, Written, carried_metadata, kohya_tensors


class Comfy:
    name = "comfy"

    def write(self, adapter: Adapter, target: Target) -> Written:
        written = Written(metadata=carried_metadata(adapter))
        for entry in adapter.entries:
            tensors = kohya_tensors(entry, norms=False, sets=True)
            if entry.ref.part is not None:
                tensors = "OFT blocks of one part of a fused module cannot be expressed in this dialect"
            if isinstance(tensors, str):
                written.lost.append(Lost(entry.keys, f"{entry.ref}: {tensors}"))
                continue
            module = _prefix(entry, target) + entry.ref.name
            for suffix, tensor in tensors.items():
                key = f"{module}.scale" if entry.param == "scale" else f"{module}.{suffix}"
                written.tensors[key] = tensor
        written.tensors |= adapter.carried
        return written


def _prefix(entry: Entry, target: Target) -> str:
    component = entry.ref.component
    if not component.startswith("te"):
        return "diffusion_model."
    return f"text_encoders.{target.encoders.get(component, 'clip_l')}.transformer."
