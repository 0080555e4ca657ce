"""candle-lora's names: `<path>.a<id>.weight` (down) and `<path>.b<id>.weight` (up), as its models look them up.

The path is that of the struct that holds the layer, and the id numbers the struct's layers: linear, then conv1d,
conv2d, embed. Its models use different paths (``prefix``; by default `lora_linear` and the like):

    mistral stable_lm t5 mpt blip     <module>.traced_lora_linear | traced_lora_embed | ...
    bert bigcode starcoder resnet     <module>.lora_linear | lora_embed | lora_conv2d | lora_conv1d
    dinov2                            <parent>.lora_<leaf>            lora_qkv, lora_proj, lora_fc1, lora_fc2, lora_head
    falcon                            <parent>.lora_<leaf>            lora_query_key_value, lora_dense
                                      lora_falcon                     lm_head, word_embeddings
    llama                             lora_llama                      embed_tokens, lm_head
                                      <attention>.lora_llama_csa      q, k, v, o
                                      <layer>.lora_llama_block        gate, up, down
    anything else                     <module>.<prefix>

A layer that the model `prefix` does not adapt (`_LAYERS`) cannot be written: the program would never look it up.
If the path does not identify the layer of an id, the metadata records it (`inweave.candle_modules`), so that the file
can be read again. A Conv1d has a (r*k, in*k) and b (out*k, r*k), whose product is the weight's change only for kernels
of size one. The format stores neither alpha nor rank; the Rust program passes them to `LoraConfig::new(rank, alpha,
..)`, once for the whole model. So only an adapter with one rank and one alpha can be written, and a note states the
numbers to pass.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

from inweave.adapter import Adapter, Entry, Form, Lora, Tensor
from inweave.formats.dialects.base import (
    CANDLE_ALPHA,
    CANDLE_MODULES,
    Dialect,
    Lost,
    ModelNames,
    ModuleKeys,
    Written,
    alpha_record,
    carried_metadata,
)

_TRACED = ("mistral", "stable_lm", "t5", "mpt", "blip", "traced_lora")
_PLAIN = ("", "bert", "bigcode", "starcoder", "resnet", "lora")
_LEAVES = {"dinov2": ("qkv", "proj", "fc1", "fc2", "head"), "falcon": ("query_key_value", "dense")}
#: model -> the layers that it adapts, by the names of its checkpoints; the other models adapt all linear layers
_LAYERS = {
    "dinov2": r"blocks\.\d+\.(attn\.(qkv|proj)|mlp\.fc[12])|patch_embed\.proj|head",
    "falcon": r"transformer\.(h\.\d+\.self_attention\.(query_key_value|dense)|word_embeddings)|lm_head",
    "resnet": r"conv1|layer[1-4]\.\d+\.(conv[123]|downsample\.0)",
    "mpt": r"(transformer\.)?(blocks\.\d+\.(attn\.(Wqkv|out_proj)|ffn\.(up|down)_proj)|wte)",
    "bigcode": r"transformer\.(h\.\d+\.(attn\.c_(attn|proj)|mlp\.c_(fc|proj))|wte|wpe)|lm_head",
    "llama": r"model\.(layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj|embed_tokens)|lm_head",
}
_LAYERS["starcoder"] = _LAYERS["bigcode"]
#: candle-lora's models with known paths
MODELS = (*_TRACED, *_PLAIN[1:], "dinov2", "falcon", "llama")
#: path segments after a module's name that identify the module
_TELLING = {f"{root}_{kind}" for root in ("lora", "traced_lora") for kind in ("linear", "embed", "conv1d", "conv2d")}
_ORDER = ("lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Candle(Dialect):
    """The names of candle-lora's structs."""

    name = "candle"
    description = "candle-lora's structs, for any model; candle-lora (Rust)"
    form: ClassVar[Form | None] = Form("candle")
    generic = True
    has_structs = True

    def claims(self, keys: ModuleKeys) -> str:
        return self.name if not keys.prefix and self.name in keys.families else ""

    def write(self, adapter: Adapter, names: ModelNames) -> Written:
        written = Written(metadata=carried_metadata(adapter))
        settings: dict[tuple[int, float], list[str]] = {}
        owners: dict[str, str] = {}
        paths: dict[str, list[tuple[Entry, Tensor, Tensor]]] = {}
        for entry in adapter.entries:
            pair = _pair(entry)
            owner = owners.setdefault(entry.ref.name, entry.ref.component)
            if owner != entry.ref.component:
                pair = f"{owner} has a module of the same name, and candle-lora files do not name networks"
            if (layers := _LAYERS.get(names.prefix)) and not re.fullmatch(layers, entry.ref.name):
                pair = f"candle-lora's {names.prefix} adapts no layer of this name, only {layers.replace(chr(92), '')}"
            if isinstance(pair, str):
                written.lost.append(Lost(entry.keys, f"{entry.ref}: {pair}"))
                continue
            factors = entry.factors
            settings.setdefault((factors.rank or 0, factors.scale), []).extend(entry.keys)
            paths.setdefault(struct_path(entry, names.prefix), []).append((entry, *pair))
        modules = _number(paths, written)
        if names.dummy_embedding is not None and settings and "lora_llama" not in paths:
            rank = next(iter(settings))[0]
            modules["lora_llama.0"], rows, features = names.dummy_embedding
            written.tensors["lora_llama.a0.weight"] = Tensor("F32", (rank, rows), bytes(4 * rank * rows))
            written.tensors["lora_llama.b0.weight"] = Tensor("F32", (features, rank), bytes(4 * rank * features))
            written.notes.append(
                "lora_llama.a0 and b0 hold zeros: candle-lora's llama looks for a pair of its token embedding"
            )
        if modules:
            written.metadata[CANDLE_MODULES] = json.dumps(modules, separators=(",", ":"), sort_keys=True)
        written.lost += [
            Lost((key,), "a carried tensor cannot be stored in a candle-lora file") for key in adapter.carried
        ]
        if len(settings) > 1:
            usual = max(settings, key=lambda pair: len(settings[pair]))
            for setting, keys in settings.items():
                if setting != usual:
                    reason = (
                        f"rank {setting[0]} and scale {setting[1]:g}, "
                        "while candle-lora has one rank and alpha for the whole model"
                    )
                    written.lost.append(Lost(tuple(keys), reason))
        elif settings:
            rank, scale = next(iter(settings))
            written.metadata[CANDLE_ALPHA] = repr(scale * rank)
            written.notes.append(f"load it with LoraConfig::new({rank}, {scale * rank:g}, None)")
        written.metadata |= alpha_record(adapter.entries)
        return written


def _pair(entry: Entry) -> tuple[Tensor, Tensor] | str:
    """Return the pair as candle-lora stores it, or why it cannot."""
    factors = entry.factors
    if not isinstance(factors, Lora) or factors.mid or factors.magnitude or factors.residual or factors.widen:
        return "candle-lora holds plain LoRA pairs only"
    if factors.transposed and not factors.embedding:
        return "candle-lora has no transposed layers"
    if len(factors.down.shape) != 3:
        return factors.down, factors.up
    if factors.down.shape[2] != 1 or factors.groups != 1:
        return "candle-lora's Conv1d factors support only kernels of size one without groups"
    return factors.down.reshaped(factors.down.shape[:2]), factors.up.reshaped(factors.up.shape[:2])


def _kind(factors: Lora) -> str:
    return "embed" if factors.embedding else {3: "conv1d", 4: "conv2d"}.get(len(factors.down.shape), "linear")


def struct_path(entry: Entry, prefix: str) -> str:
    """Return the path at which candle-lora's model ``prefix`` looks up a module's factors."""
    assert isinstance(entry.factors, Lora)
    name, kind = entry.ref.name, _kind(entry.factors)
    parent, _, leaf = name.rpartition(".")
    if prefix in _PLAIN:
        return f"{name}.lora_{kind}"
    if prefix in _TRACED:
        return f"{name}.traced_lora_{kind}"
    if prefix in _LEAVES and leaf in _LEAVES[prefix]:
        return f"{parent}.lora_{leaf}" if parent else f"lora_{leaf}"
    if prefix == "falcon":
        return "lora_falcon"
    if prefix == "dinov2":
        return f"{name}.lora_{kind}"
    if prefix == "llama":
        if leaf in ("embed_tokens", "lm_head"):
            return "lora_llama"
        outer, _, block = parent.rpartition(".")
        return f"{parent}.lora_llama_csa" if block == "self_attn" else f"{outer or parent}.lora_llama_block"
    return f"{name}.{prefix}"


def _number(paths: dict[str, list[tuple[Entry, Tensor, Tensor]]], written: Written) -> dict[str, str]:
    """Number the layers of each struct; return the modules that their path does not identify, by path and id."""
    modules: dict[str, str] = {}
    several, leaves = 0, list[str]()
    for path, layers in paths.items():
        layers.sort(key=lambda layer: _rank_of(layer[0]))
        if len(layers) > 1:
            several += 1
            leaves += [entry.ref.name.rpartition(".")[2] for entry, *_ in layers]
        for number, (entry, down, up) in enumerate(layers):
            written.tensors[f"{path}.a{number}.weight"] = down
            written.tensors[f"{path}.b{number}.weight"] = up
            if path.removeprefix(f"{entry.ref.name}.") not in _TELLING:
                modules[f"{path}.{number}"] = entry.ref.name
    if several:
        written.notes.append(
            f"{several} structs hold several layers, numbered as {', '.join(dict.fromkeys(leaves))}; candle-lora "
            "itself numbers them in the order of a hash map, which differs from run to run"
        )
    return modules


def _rank_of(entry: Entry) -> tuple[bool, int, str]:
    """Return a sort key: linear layers before embeddings, attention projections in their usual order, then by name."""
    leaf = entry.ref.name.rpartition(".")[2]
    assert isinstance(entry.factors, Lora)
    return entry.factors.embedding, _ORDER.index(leaf) if leaf in _ORDER else len(_ORDER), entry.ref.name


DIALECT = Candle()
