"""The layers behind the numbers of candle-lora's PEFT converters, derived from the model.

The converters sort the modules of a PEFT adapter by name, as text (`layers.10` before `layers.2`), and number them:

    <prefix>.a<id>.weight            all modules
    lora_llama.a<id>.weight          embed_tokens, lm_head         each group has a count of its own
    lora_llama_csa.a<id>.weight      q_proj, k_proj, v_proj, o_proj
    lora_llama_block.a<id>.weight    everything else

The path of a layer is lost. It can be recovered if exactly one set of leaf names (q_proj and v_proj, say) has as many
modules as there are numbers, with matching shapes; if several do, the numbers stay unplaced.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations

from inweave.adapter import Adapter, Entry, Ref
from inweave.targets.fit import either_way, fitted
from inweave.targets.index import ModelIndex
from inweave.targets.links import Shape

_KEY = re.compile(r"^(.*?)\.?[ab](\d+)\.weight$")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_EMBEDDINGS = ("embed_tokens", "lm_head")
_MOST_LEAVES = 10


def name_layers(adapter: Adapter, index: ModelIndex) -> Adapter:
    """Return the adapter with the modules of numbered layers in place of their struct, where they can be identified."""
    if not any(entry.ref.below for entry in adapter.entries):
        return adapter
    weights: dict[str, Shape] = {
        part.removesuffix(".weight"): shape
        for component in index
        for part, shape in component.parts.items()
        if part.endswith(".weight") and len(shape) == 2
    }
    inner = {".".join(name.split(".")[:count]) for name in weights for count in range(1, name.count(".") + 2)}
    groups: dict[str, dict[int, int]] = {}
    for position, entry in enumerate(adapter.entries):
        own = (
            entry.ref.below and entry.ref.name not in inner
        )  # otherwise it is a struct of this model with its own numbering
        if own and (match := _KEY.match(entry.keys[0])):
            groups.setdefault(match[1], {})[int(match[2])] = position
    entries = list(adapter.entries)
    for path, positions in groups.items():
        if sorted(positions) == list(range(len(positions))):
            ordered = [entries[positions[number]] for number in range(len(positions))]
            for number, layer in enumerate(_only_reading(ordered, _members(path, weights))):
                entries[positions[number]] = layer
    return replace(adapter, entries=tuple(entries))


def _members(path: str, weights: dict[str, Shape]) -> dict[str, Shape]:
    """Return the modules that a group may hold."""
    group = path.rpartition(".")[2]
    attention = {name for name in weights if ".self_attn." in name and name.rpartition(".")[2] in _ATTENTION}
    tables = {name for name in weights if name.rpartition(".")[2] in _EMBEDDINGS}
    names = {"lora_llama": tables, "lora_llama_csa": attention, "lora_llama_block": weights.keys() - attention - tables}
    return {name: weights[name] for name in names.get(group, weights.keys())}


def _only_reading(entries: list[Entry], members: dict[str, Shape]) -> list[Entry]:
    """Return the entries under the names of the one set of modules they fit; empty if there is none or more than
    one.
    """
    by_leaf: dict[str, list[str]] = {}
    for name in members:
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    readings: list[list[Entry]] = []
    for count in range(1, len(by_leaf) + 1) if len(by_leaf) <= _MOST_LEAVES else ():
        for leaves in combinations(by_leaf, count):
            names = sorted(name for leaf in leaves for name in by_leaf[leaf])
            if len(names) != len(entries):
                continue
            layers = [_named_layer(entry, name, members[name]) for entry, name in zip(entries, names, strict=True)]
            if all(layers):
                readings.append([layer for layer in layers if layer is not None])
    return readings[0] if len(readings) == 1 else []


def _named_layer(entry: Entry, name: str, shape: Shape) -> Entry | None:
    factors = either_way(entry.factors, shape, name)
    return replace(entry, ref=Ref("", name), factors=factors) if fitted(factors, shape) is not None else None
