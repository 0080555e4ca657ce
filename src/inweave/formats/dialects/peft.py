"""A PEFT directory: the adapter of one network, with its scaling in adapter_config.json.

base_model.model.<module>.lora_A.weight, lora_B.weight, lora_magnitude_vector, ...
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from inweave.adapter import ALGORITHMS, Adapter, Entry, Form, Full, Tensor, TokenRows
from inweave.formats.config import from_adapter_config, json_object
from inweave.formats.dialects.base import (
    BASE_MODEL,
    PEFT_CONFIG,
    TASK_TYPE,
    Dialect,
    Lost,
    ModelNames,
    Written,
    alpha_record,
)
from inweave.formats.dialects.peft_config import (
    lora_config,
    lycoris_config,
    packed_owners,
    packed_problem,
    still_describes,
)


class Peft(Dialect):
    """The names of the model itself under PEFT's prefix."""

    name = "peft"
    description = "a PEFT directory, for any torch model; PEFT, transformers and diffusers"
    dotted_prefixes = (("base_model.model.", ""),)
    form: ClassVar[Form | None] = Form("peft", replaces=True, magnitude="lora_magnitude_vector")
    generic = True
    is_directory = True

    def form_of(self, adapter: Adapter, names: ModelNames) -> Form:
        kinds = {entry.factors.peft_type for entry in adapter.entries} - {"", "LORA"}
        return replace(super().form_of(adapter, names), peft_type=min(kinds, default="LORA"))

    def write(self, adapter: Adapter, names: ModelNames) -> Written:
        components = dict.fromkeys(entry.ref.component for entry in adapter.entries)
        main = "unet" if "unet" in components else next(iter(components), "")
        others = [entry for entry in adapter.entries if entry.ref.component != main]
        if others:
            adapter = replace(adapter, entries=tuple(e for e in adapter.entries if e.ref.component == main))
        wrong = {e.keys: reason for e in adapter.entries if (reason := packed_problem(e, adapter.entries))}
        adapter = replace(adapter, entries=tuple(e for e in adapter.entries if e.keys not in wrong))
        written = super().write(adapter, names)
        written.lost += [Lost(keys, reason) for keys, reason in wrong.items()]
        reason = f"a PEFT directory holds one network ({main}), this belongs to"
        written.lost += [Lost(entry.keys, f"{reason} {entry.ref.component}") for entry in others]
        return written

    def module(self, entry: Entry, names: ModelNames) -> str:
        return f"base_model.model.{entry.ref.name}"

    def carries(self, key: str) -> bool:
        return key.startswith("base_model.")

    def finish(self, written: Written, entries: list[Entry], adapter: Adapter, names: ModelNames) -> None:
        written.tensors = _nested(written.tensors, entries)
        stash = json_object(written.metadata.pop(PEFT_CONFIG, None))
        if stash and still_describes({"": from_adapter_config(stash)}, entries):
            written.config = stash
        else:
            kind = self.form_of(adapter, names).peft_type
            written.config = _lora_directory(entries) if kind == "LORA" else _directory(kind, entries)
            written.config["base_model_name_or_path"] = adapter.metadata.get(BASE_MODEL)
            written.config["task_type"] = adapter.metadata.get(TASK_TYPE)
        written.metadata |= alpha_record(entries)


def _nested(tensors: dict[str, Tensor], entries: list[Entry]) -> dict[str, Tensor]:
    """Return the tensors under the names of PEFT's wrappers around modules whose bare parameters are adapted.

    attn.in_proj -> attn, attn.out_proj -> attn.base_layer.out_proj      torch's MultiheadAttention
    experts.gate_up_proj -> experts.base_layer, experts.down_proj -> experts      in the order of the parameters
    """
    owners: dict[str, list[Entry]] = {}
    packed = packed_owners(entries)
    for entry in entries:
        if entry.factors.of_parameter:
            owners.setdefault(entry.ref.name.rpartition(".")[0], []).append(entry)
    for every in owners.values():  # a stable sort: the order of the entries is right where no file gave a depth
        every.sort(key=lambda entry: -(entry.factors.nesting or (-1,))[0])
    renamed = {entry.ref.name: owner + ".base_layer" * (len(every) - 1 - number)
               for owner, every in owners.items() for number, entry in enumerate(every)}  # fmt: skip
    renamed |= {f"{owner}.in_proj": owner for owner in packed}
    renamed |= {f"{owner}.out_proj": f"{owner}.base_layer.out_proj" for owner in packed}
    result: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        head = key.removeprefix("base_model.model.")
        old = next((name for name in (head.rpartition(".")[0], head.rpartition(".lora_")[0]) if name in renamed), None)
        result[key if old is None else f"base_model.model.{renamed[old]}{head.removeprefix(old)}"] = tensor
    return result


def _lora_directory(entries: list[Entry]) -> dict[str, object]:
    """Return an adapter_config.json for a LoRA directory."""
    wholes = [(e, e.factors) for e in entries if isinstance(e.factors, Full) and e.factors.mode == "set"]
    saved = sorted({e.ref.name for e, factors in wholes if not factors.inside and e.param != "bias"})
    biases = {e.ref.name for e, factors in wholes if not factors.inside and e.param == "bias"} - set(saved)
    inner = any(factors.inside for _, factors in wholes)
    tokens = {e.ref.name: list(e.factors.indices) for e in entries if isinstance(e.factors, TokenRows)}
    pairs = [e.factors for e in entries if e.factors.peft_type == "LORA"]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "fan_in_fan_out": any(f.transposed and not getattr(f, "embedding", False) for f in pairs),
        "lora_dropout": 0.0,
        "modules_to_save": saved or None,
        "trainable_token_indices": tokens or None,
        **lora_config(entries),
        "target_parameters": sorted(e.ref.name for e in entries if e.factors.of_parameter) or None,
        "bias": "all" if biases else "lora_only" if inner else "none",
    }


def _directory(kind: str, entries: list[Entry]) -> dict[str, object]:
    """Return an adapter_config.json for a directory of another algorithm."""
    algorithm = next(each for each in ALGORITHMS.values() if each.peft_type == kind)
    return {
        "peft_type": kind,
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        **lycoris_config(entries, algorithm.peft_options([entry.factors for entry in entries])),
        "modules_to_save": None,
    }


DIALECT = Peft()
