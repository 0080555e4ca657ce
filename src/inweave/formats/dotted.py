"""The PEFT family with dotted names: diffusers' files, PEFT directories, and BFL's own.

diffusers   unet.|transformer.|text_encoder[_2].<diffusers module>.lora_A.weight, lora_B.weight;
            scaling other than 1 travels in the metadata (`lora_adapter_metadata`)
peft        base_model.model.<module>...., scaling in adapter_config.json; one network a directory
bfl         <original module>.lora_A.weight, lora_B.bias, <norm>.scale; no scaling at all
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable

from inweave.adapter import Adapter, Entry, Full, Loha, Lokr, Lora, Tensor, TokenRows, scale
from inweave.formats.config import PeftConfig, from_adapter_config, from_metadata, json_object
from inweave.formats.spell import (
    DIFFUSERS_CONFIG,
    PEFT_CONFIG,
    Lost,
    Target,
    Written,
    alpha_record,
    carried_metadata,
    peft_magnitude,
)


class Diffusers:
    name = "diffusers"

    def write(self, adapter: Adapter, target: Target) -> Written:
        written = Written(metadata=carried_metadata(adapter))
        entries: list[Entry] = []
        unscaled = unscaled_modules(adapter)
        for entry in adapter.entries:
            tensors = _lora_tensors(entry, magnitude="lora_magnitude_vector.weight", unscaled=unscaled, widening=True)
            if isinstance(tensors, str):
                written.lost.append(Lost(entry.keys, f"{entry.ref}: {tensors}"))
                continue
            entries.append(entry)
            prefix = _folder(entry.ref.component, target)
            written.tensors |= {f"{prefix}.{entry.ref.name}.{suffix}": t for suffix, t in tensors.items()}
        written.lost += [Lost((key,), "a carried tensor cannot be stored in a diffusers LoRA file")
                         for key in adapter.carried]  # fmt: skip
        stash = written.metadata.pop(DIFFUSERS_CONFIG, None)
        if stash is not None and _still_describes(from_metadata({"lora_adapter_metadata": stash}), entries):
            written.metadata["lora_adapter_metadata"] = stash
        elif any(_scales(entry) for entry in entries):
            written.metadata["lora_adapter_metadata"] = json.dumps(
                _packed(entries, target), sort_keys=True, allow_nan=False
            )
        written.metadata |= alpha_record(entries)
        return written


def _folder(component: str, target: Target) -> str:
    if component == "unet2":
        return "transformer_2"
    if not component.startswith("te"):
        return target.denoiser if target.denoiser != "model" else "unet"
    number = sorted(target.encoders).index(component) + 1 if component in target.encoders else 1
    return "text_encoder" if number == 1 else f"text_encoder_{number}"


def _packed(entries: list[Entry], target: Target) -> dict[str, object]:
    packed: dict[str, object] = {}
    for component in dict.fromkeys(entry.ref.component for entry in entries):
        inside = [entry for entry in entries if entry.ref.component == component]
        packed |= {f"{_folder(component, target)}.{name}": value for name, value in lora_config(inside).items()}
    return packed


class Peft:
    name = "peft"

    def write(self, adapter: Adapter, target: Target) -> Written:
        written = Written(metadata=carried_metadata(adapter))
        components = Counter(entry.ref.component for entry in adapter.entries)
        main = "unet" if "unet" in components else next(iter(components), "")
        unscaled = unscaled_modules(adapter)
        kinds = {"loha" for entry in adapter.entries if isinstance(entry.factors, Loha)}
        entries: list[Entry] = []
        for entry in adapter.entries:
            if entry.ref.component != main:
                written.lost.append(
                    Lost(
                        entry.keys,
                        f"a PEFT directory holds one network ({main}), this belongs to {entry.ref.component}",
                    )
                )
                continue
            tensors = (
                _loha_tensors(entry)
                if kinds == {"loha"}
                else _lora_tensors(entry, magnitude="lora_magnitude_vector", whole=True, unscaled=unscaled)
            )
            if isinstance(tensors, str):
                written.lost.append(Lost(entry.keys, f"{entry.ref}: {tensors}"))
                continue
            entries.append(entry)
            written.tensors |= {f"base_model.model.{entry.ref.name}.{suffix}": t for suffix, t in tensors.items()}
        for key, tensor in adapter.carried.items():
            if key.startswith("base_model."):
                written.tensors[key] = tensor
            else:
                written.lost.append(Lost((key,), "a carried tensor cannot be stored in a PEFT directory"))
        stash = json_object(written.metadata.pop(PEFT_CONFIG, None))
        if stash and _still_describes({"": from_adapter_config(stash)}, entries):
            written.config = stash
        else:
            written.config = loha_config(entries) if kinds == {"loha"} else full_config(entries)
        written.metadata |= alpha_record(entries)
        return written


class Bfl:
    name = "bfl"

    def write(self, adapter: Adapter, target: Target) -> Written:
        written = Written(metadata=carried_metadata(adapter))
        unscaled = unscaled_modules(adapter)
        for entry in adapter.entries:
            tensors = _lora_tensors(entry, magnitude=None, unscaled=unscaled, widening=True)
            if entry.param == "scale" and isinstance(entry.factors, Full) and entry.factors.mode == "set":
                tensors = {"scale": entry.factors.value}
            if not isinstance(tensors, str) and _scales(entry):
                tensors = (
                    f"alpha {entry.factors.alpha:g} scales it by {entry.factors.scale:g}, and BFL files have no scaling"
                )
            if entry.ref.component != "unet" or target.family not in ("flux", "flux2"):
                tensors = "BFL files hold Flux transformers only"
            if isinstance(tensors, str):
                written.lost.append(Lost(entry.keys, f"{entry.ref}: {tensors}"))
                continue
            written.tensors |= {f"{entry.ref.name}.{suffix}": t for suffix, t in tensors.items()}
        written.lost += [Lost((key,), "a carried tensor cannot be stored in a BFL file")
                         for key in adapter.carried]  # fmt: skip
        written.metadata |= alpha_record(adapter.entries)
        return written


def unscaled_modules(adapter: Adapter) -> set[tuple[str, str]]:
    """Modules whose LoRA has scale 1: there a plain bias change equals a LoRA's own bias."""
    return {
        (e.ref.component, e.ref.name) for e in adapter.entries if isinstance(e.factors, Lora) and e.factors.scale == 1
    }


def _lora_tensors(
    entry: Entry,
    *,
    magnitude: str | None,
    whole: bool = False,
    unscaled: Collection[tuple[str, str]] = (),
    widening: bool = False,
) -> dict[str, Tensor] | str:
    """lora_A/lora_B and what goes with them.

    ``whole``: replaced modules can be written; ``widening``: loaders widen the input layer by themselves.
    """
    factors = entry.factors
    if isinstance(factors, Full):
        plain = factors.mode == "add" and (entry.ref.component, entry.ref.name) in unscaled
        if entry.param == "bias" and (factors.bias_rank is not None or plain):
            return {"lora_B.bias": factors.value}
        if whole and factors.mode == "set" and factors.inside and entry.param != "bias":
            return f"its own {entry.param} was trained beside the adapter, and PEFT reads the base's there"
        if whole and factors.mode == "set":
            return {f"base_layer.{entry.param}" if factors.inside else entry.param: factors.value}
        return "whole-weight changes cannot be expressed in this dialect"
    if isinstance(factors, TokenRows) and whole:
        return {"token_adapter.trainable_tokens_delta": factors.value}
    if isinstance(factors, Lokr) and whole:
        return "PEFT derives the sizes of LoKr factors from its own configuration, which cannot describe these"
    if not isinstance(factors, Lora) or factors.mid is not None:
        return f"{'a Tucker core' if isinstance(factors, Lora) else factors.kind} cannot be expressed in this dialect"
    if factors.residual is not None or (factors.widen is not None and not widening) or factors.stored_scale is not None:
        return "a sparse residual, widened weight or explicit scale cannot be expressed in this dialect"
    if factors.embedding and factors.magnitude is not None and (not whole or factors.magnitude.axis == "in"):
        return "a DoRA magnitude on an embedding cannot be expressed in this dialect"
    if factors.embedding and whole:
        norms = {} if factors.magnitude is None else {str(magnitude): factors.magnitude.tensor}
        return {"lora_embedding_A": factors.down, "lora_embedding_B": factors.up, **norms}
    if factors.transposed and not whole:
        return "a change for a transposed weight cannot be expressed in this dialect"
    tensors = {"lora_A.weight": factors.down, "lora_B.weight": factors.up}
    if factors.magnitude is not None:
        vector = peft_magnitude(factors)
        if vector is None or magnitude is None:
            return "a DoRA magnitude on this axis cannot be expressed in this dialect"
        tensors[magnitude] = vector
    return tensors


def _loha_tensors(entry: Entry) -> dict[str, Tensor] | str:
    if not isinstance(entry.factors, Loha) or entry.factors.magnitude is not None:
        return "a PEFT LoHa directory holds plain LoHa only"
    if entry.factors.transposed:
        return "PEFT has no LoHa for a weight stored as (in, out)"
    return {f"hada_{role}": tensor for role, tensor in entry.factors.tensors().items()}


def _scales(entry: Entry) -> bool:
    return isinstance(entry.factors, Lora | Loha) and entry.factors.scale != 1.0


def _still_describes(configs: dict[str, PeftConfig], entries: Iterable[Entry]) -> bool:
    """Whether a configuration kept from an earlier form still gives every module its scale."""
    for entry in entries:
        factors = entry.factors
        config = configs.get(entry.ref.component) or configs.get("")
        if not isinstance(factors, Lora | Loha):
            continue
        if config is None:
            return False
        recorded = scale(config.alpha_of(entry.ref.name), factors.rank, rslora=config.rslora)
        if abs(recorded - factors.scale) > 1e-6 * abs(factors.scale):
            return False
    return True


def _patterns(entries: Iterable[Entry]) -> dict[str, object]:
    """r, lora_alpha and the exceptions; alpha = rank where the file had none."""
    rows = {_config_name(e): e.factors for e in entries if isinstance(e.factors, Lora | Loha)}
    ranks = {name: f.rank for name, f in rows.items()}
    alphas = {name: f.scale * f.rank if not f.rslora else f.scale * f.rank**0.5 for name, f in rows.items()}
    alphas = {name: rows[name].alpha or value for name, value in alphas.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0] if ranks else 0
    alpha = Counter(alphas.values()).most_common(1)[0][0] if alphas else 0.0
    return {
        "r": rank,
        "lora_alpha": _whole(alpha),
        "rank_pattern": {_anchored(n, rows): r for n, r in ranks.items() if r != rank},
        "alpha_pattern": {_anchored(n, rows): _whole(a) for n, a in alphas.items() if a != alpha},
    }


def _config_name(entry: Entry) -> str:
    """Text encoders have lost their `text_model.` in memory; patterns match the end of a path either way."""
    encoder = entry.ref.component.startswith("te")
    return entry.ref.name.removeprefix("text_model.") if encoder else entry.ref.name


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def _anchored(name: str, names: Iterable[str]) -> str:
    """A pattern also matches longer paths that end with it; anchor it where there are any."""
    return f"^{name}" if any(other.endswith(f".{name}") for other in names) else name


def lora_config(entries: list[Entry]) -> dict[str, object]:
    """The PEFT fields that give these entries their scale."""
    loras = [entry for entry in entries if isinstance(entry.factors, Lora)]
    return {
        **_patterns(loras),
        "target_modules": sorted({_config_name(entry) for entry in loras}),
        "use_rslora": any(entry.factors.rslora for entry in loras),
        "use_dora": any(entry.factors.magnitude is not None for entry in loras),
        "lora_bias": any(isinstance(e.factors, Full) and e.factors.bias_rank is not None for e in entries),
        "bias": "none",
    }


def full_config(entries: list[Entry]) -> dict[str, object]:
    """An adapter_config.json for a LoRA directory."""
    wholes = [(e, e.factors) for e in entries if isinstance(e.factors, Full) and e.factors.mode == "set"]
    saved = sorted({e.ref.name for e, factors in wholes if not factors.inside and e.param != "bias"})
    biases = {e.ref.name for e, factors in wholes if not factors.inside and e.param == "bias"} - set(saved)
    inner = any(factors.inside for _, factors in wholes)
    tokens = {e.ref.name: list(e.factors.indices) for e in entries if isinstance(e.factors, TokenRows)}
    fan = [e.factors.transposed for e in entries if isinstance(e.factors, Lora) and not e.factors.embedding]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "fan_in_fan_out": any(fan),
        "lora_dropout": 0.0,
        "modules_to_save": saved or None,
        "trainable_token_indices": tokens or None,
        **lora_config(entries),
        "bias": "all" if biases else "lora_only" if inner else "none",
    }


def loha_config(entries: list[Entry]) -> dict[str, object]:
    fields = _patterns(entries)
    return {
        "peft_type": "LOHA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": fields["r"],
        "alpha": fields["lora_alpha"],
        "rank_pattern": fields["rank_pattern"],
        "alpha_pattern": fields["alpha_pattern"],
        "target_modules": sorted({entry.ref.name for entry in entries}),
        "use_effective_conv2d": any(isinstance(e.factors, Loha) and e.factors.t1 is not None for e in entries),
        "modules_to_save": None,
    }
