"""The kohya family with flat names: kohya's own spelling and OneTrainer's.

    kohya       lora_unet_<flat> lora_te_<flat>|lora_te1_.. + lora_down.weight lora_up.weight alpha
    onetrainer  lora_unet_|lora_transformer_<flat>, T5 behind Flux is lora_te2_

Numbered OFT parts keep kohya's `oft_unet_<flat>.oft_blocks.<i>`.
"""

from __future__ import annotations

from inweave.adapter import Adapter, Entry
from inweave.formats.spell import Lost, Target, Written, carried_metadata, kohya_tensors

_ONETRAINER_KINDS = ("lora", "loha", "lokr", "oft_in", "full")


class Kohya:
    name = "kohya"

    def write(self, adapter: Adapter, target: Target) -> Written:
        written = Written(metadata=carried_metadata(adapter))
        for entry in adapter.entries:
            _add(written, entry, self.prefix(entry, target))
        written.tensors |= adapter.carried
        return written

    def prefix(self, entry: Entry, target: Target) -> str:
        component = entry.ref.component
        if not component.startswith("te"):
            return "lora_unet_"
        if target.encoders.get(component) == "t5xxl" and len(target.encoders) > 1:
            return "lora_te3_"
        return f"lora_{component}_" if len(target.encoders) > 1 or target.family == "flux" else "lora_te_"


class OneTrainer(Kohya):
    name = "onetrainer"

    def write(self, adapter: Adapter, target: Target) -> Written:
        written = Written(metadata=carried_metadata(adapter))
        for entry in adapter.entries:
            if entry.factors.kind not in _ONETRAINER_KINDS:
                written.lost.append(Lost(entry.keys, f"OneTrainer has no {entry.factors.kind}"))
                continue
            _add(written, entry, self.prefix(entry, target))
        written.tensors |= adapter.carried
        return written

    def prefix(self, entry: Entry, target: Target) -> str:
        component = entry.ref.component
        if not component.startswith("te"):
            return "lora_transformer_" if target.denoiser == "transformer" else "lora_unet_"
        return f"lora_{component}_" if len(target.encoders) > 1 or target.family == "flux" else "lora_te_"


def _add(written: Written, entry: Entry, prefix: str) -> None:
    module = prefix + entry.ref.name.replace(".", "_")
    tensors: object = kohya_tensors(entry)
    if entry.factors.kind == "oft_in":
        tensors = {
            f"oft_R.{'scaled_oft' if role == 'spread' else 'weight'}": t for role, t in entry.factors.tensors().items()
        }
    if isinstance(tensors, str):
        written.lost.append(Lost(entry.keys, f"{entry.ref}: {tensors}"))
        return
    assert isinstance(tensors, dict)
    if entry.ref.part is not None:
        module = module.replace("lora_", "oft_", 1)
        tensors = {f"oft_blocks.{entry.ref.part}" if s == "oft_blocks" else s: t for s, t in tensors.items()}
    for suffix, tensor in tensors.items():
        written.tensors[f"{module}.{suffix}"] = tensor
