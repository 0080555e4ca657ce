"""What all writers share: from an entry to suffixed tensors, in one of two suffix families.

    kohya family   lora_down.weight lora_up.weight alpha dora_scale, LyCORIS' names for the rest
    PEFT family    lora_A.weight lora_B.weight lora_magnitude_vector, no alpha in the file

A writer is given entries whose names are dotted and already in the naming it wants; it adds prefixes and
suffixes and moves nothing. What the dialect cannot express comes back as `Lost`, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from inweave.adapter import Adapter, Boft, Entry, Factors, Full, Glora, Ia3, Loha, Lokr, Lora, Oft, Tensor, scalar

#: metadata keys inweave adds so that a later conversion gives back the same bits
STORED_ALPHA = "inweave.alpha"
CANDLE_ALPHA = "inweave.candle_alpha"
CANDLE_MODULES = "inweave.candle_modules"
PEFT_CONFIG = "inweave.adapter_config"
DIFFUSERS_CONFIG = "inweave.lora_adapter_metadata"


@dataclass(frozen=True, slots=True)
class Target:
    """What a writer must know about the model: how its networks are called."""

    denoiser: str = "unet"  # "unet", "transformer", or "model" for anything else
    encoders: Mapping[str, str] = field(default_factory=dict)  # component -> clip_l, clip_g, clip_h, t5xxl, ...
    family: str = "own"
    prefix: str = ""  # of candle-lora's own structs: one of its models, or any name
    dummy_embedding: tuple[str, int, int] | None = None  # (module, rows, features) that get factors of zeros


@dataclass(frozen=True, slots=True)
class Lost:
    keys: tuple[str, ...]
    reason: str


@dataclass(slots=True)
class Written:
    """A file ready to be saved; with ``config`` it becomes a directory."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    config: dict[str, object] | None = None
    lost: list[Lost] = field(default_factory=list)
    duplicates: list[Lost] = field(default_factory=list)  # not written, because finer tensors of the file say the same
    notes: list[str] = field(default_factory=list)


class Writer(Protocol):
    """Writes adapters in the dialect ``name``."""

    name: str

    def write(self, adapter: Adapter, target: Target) -> Written: ...


_LYCORIS: dict[type[Factors], dict[str, str]] = {
    Lora: {"down": "lora_down.weight", "up": "lora_up.weight", "mid": "lora_mid.weight"},
    Loha: {role: f"hada_{role}" for role in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    Lokr: {role: f"lokr_{role}" for role in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
    Glora: {role: f"{role}.weight" for role in ("a1", "a2", "b1", "b2", "bm")},
    Oft: {"blocks": "oft_blocks", "rescale": "rescale"},
    Boft: {"blocks": "oft_blocks", "rescale": "rescale"},
    Ia3: {"vector": "weight", "stored_on_input": "on_input"},
}


def kohya_tensors(entry: Entry, *, norms: bool = True, sets: bool = False) -> dict[str, Tensor] | str:
    """An entry's tensors by kohya/LyCORIS suffix, or why it has none.

    ``norms``: norm layers have suffixes of their own; ``sets``: a replacing value can be written.
    """
    factors = entry.factors
    if factors.transposed:
        return "a change for a transposed weight (embedding, Conv1D) cannot be expressed in this dialect"
    if isinstance(factors, Full):
        return _full_tensors(entry, factors, norms=norms, sets=sets)
    if type(factors) not in _LYCORIS or (isinstance(factors, Ia3) and factors.convention == "factor"):
        return f"{factors.kind} as PEFT stores it cannot be expressed in this dialect"
    suffixes = dict(_LYCORIS[type(factors)])
    if isinstance(factors, Oft) and factors.solved:
        suffixes["blocks"] = "oft_diag"
    tensors = {suffixes[role]: tensor for role, tensor in factors.tensors().items()}
    tensors |= _alpha_tensor(factors)
    if factors.stored_scale is not None:
        tensors["scale"] = factors.stored_scale
    if factors.magnitude is not None:
        tensors["dora_scale"] = _kohya_magnitude(factors)
    if factors.residual is not None:
        residual = factors.residual
        tensors |= {"bias_indices": residual.indices, "bias_values": residual.values, "bias_size": residual.size}
    if factors.widen is not None:
        if not sets:
            return "a widened base weight cannot be expressed in this dialect"
        tensors["reshape_weight"] = _int_list(factors.widen)
    return tensors


def _full_tensors(entry: Entry, factors: Full, *, norms: bool, sets: bool) -> dict[str, Tensor] | str:
    if factors.mode == "set":
        if not sets:
            return "a value that replaces the base's cannot be expressed in this dialect"
        return {"set_weight" if entry.param != "bias" else "set_bias": factors.value}
    if factors.scale != 1.0:
        return f"a bias scaled by {factors.scale:g} cannot be expressed in this dialect"
    norm = norms and (factors.norm or (entry.param == "weight" and len(factors.value.shape) == 1))
    if entry.param == "bias":
        return {"b_norm" if norm else "diff_b": factors.value}
    tensors = {"w_norm" if norm else "diff": factors.value} | _alpha_tensor(factors)
    if factors.magnitude is not None:
        tensors["dora_scale"] = _kohya_magnitude(factors)
    if factors.widen is not None:
        tensors["reshape_weight"] = _int_list(factors.widen)
    return tensors


def _alpha_tensor(factors: Factors) -> dict[str, Tensor]:
    """The stored alpha, or one made from the number where the source kept it elsewhere."""
    if factors.stored_alpha is not None and not factors.rslora:
        return {"alpha": factors.stored_alpha}
    if factors.alpha is None:
        return {}
    if isinstance(factors, Glora):
        return {"alpha": factors.stored_alpha or scalar(factors.alpha, "F64")}
    alpha = factors.alpha
    if factors.rslora and factors.rank:
        alpha = factors.scale * factors.rank  # the kohya family has no rs-LoRA: folded, as LyCORIS does it
    return {"alpha": _smallest(alpha)}


def _smallest(value: float) -> Tensor:
    try:
        return scalar(value, "F32")
    except ValueError:
        return scalar(value, "F64")


def _kohya_magnitude(factors: Factors) -> Tensor:
    """(out, 1, ...) or (1, in, ...), with as many axes as the change has."""
    magnitude = factors.magnitude
    assert magnitude is not None
    axes = max(len(factors.shape()), len(magnitude.tensor.shape), 2)
    size = magnitude.tensor.numel
    if magnitude.axis == "in":
        return magnitude.tensor if len(magnitude.tensor.shape) > 1 else magnitude.tensor.reshaped((1, size))
    return magnitude.tensor.reshaped((size,) + (1,) * (axes - 1))


def peft_magnitude(factors: Factors) -> Tensor | None:
    """(out,), or (1, out, 1, 1) for a convolution; None for the input axis, which PEFT does not have."""
    magnitude = factors.magnitude
    if magnitude is None or magnitude.axis == "in":
        return None
    axes = len(factors.shape())
    size = magnitude.tensor.numel
    return magnitude.tensor.reshaped((size,) if axes <= 2 else (1, size) + (1,) * (axes - 2))


def _int_list(values: Iterable[int]) -> Tensor:
    numbers = list(values)
    return Tensor("I64", (len(numbers),), b"".join(n.to_bytes(8, "little", signed=True) for n in numbers))


def carried_metadata(adapter: Adapter) -> dict[str, str]:
    """The source's metadata, with what another dialect would misread put out of its way."""
    metadata = dict(adapter.metadata)
    if (packed := metadata.pop("lora_adapter_metadata", None)) is not None:
        metadata[DIFFUSERS_CONFIG] = packed
    if adapter.config is not None:
        metadata[PEFT_CONFIG] = json.dumps(adapter.config, separators=(",", ":"), sort_keys=True)
    metadata.pop(STORED_ALPHA, None)
    metadata.pop(CANDLE_ALPHA, None)
    metadata.pop(CANDLE_MODULES, None)
    return metadata


def alpha_record(entries: Iterable[Entry]) -> dict[str, str]:
    """How alphas were stored, for dialects that keep only the number: {"": form, module: exception}."""
    forms: dict[str, object] = {}
    counts: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry.factors, Full):
            continue
        stored = entry.factors.stored_alpha
        form = json.dumps(None if stored is None and entry.factors.alpha is None else
                          ["", []] if stored is None else [stored.dtype, list(stored.shape)])  # fmt: skip
        forms[f"{entry.ref.component}:{entry.ref.name}"] = form
        counts[form] = counts.get(form, 0) + 1
    if not counts:
        return {}
    usual = max(counts, key=lambda form: counts[form])
    record = {"": json.loads(usual)} | {name: json.loads(str(f)) for name, f in forms.items() if f != usual}
    return {} if record == {"": ["", []]} else {STORED_ALPHA: json.dumps(record, separators=(",", ":"))}
