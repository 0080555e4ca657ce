"""Reading of every dialect: tensors -> split -> group -> classify -> Adapter.

No model is needed and no format is detected: a file may mix algorithms, ranks and dialects, so each key is split
separately, keys of the same module form a group, and the set of roles in a group determines its algorithm
(`inweave.formats.classify`). Every key ends up in an entry, as a carried tensor, or in a `KeyProblem`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from inweave.adapter import ALGORITHMS, Adapter, Entry, KeyProblem, Ref, Tensor, load_algorithms
from inweave.errors import ConfigError, FormatError
from inweave.formats.alphas import Alphas, SuppliedAlphas, assumes_alpha, assumption_warnings, supply_alphas
from inweave.formats.classify import classify
from inweave.formats.config import from_adapter_config, from_metadata, is_true, json_object, network_args
from inweave.formats.dialects import load_dialects
from inweave.formats.dialects.base import CANDLE_ALPHA, CANDLE_MODULES, STORED_ALPHA
from inweave.formats.files import Container
from inweave.formats.foreign import checkpoint_kind, foreign_kind
from inweave.formats.grammar import Key, candle_home, is_candle_path, learn_suffixes, locate, split
from inweave.formats.group import Context, Group, packed_modules
from inweave.formats.restore import candle_alphas, restore_alphas

_PASSENGERS = ("bundle_emb.", "_aux.", "trainable_tokens.")
_NOT_MERGEABLE = {
    "sam_a": "an index list of a segmentation model (w_a_NNN / w_b_NNN): not a diffusion adapter",
    "sam_b": "an index list of a segmentation model (w_a_NNN / w_b_NNN): not a diffusion adapter",
}


#: families whose keys have no prefix
_NO_PREFIX = ("cloneofsimo", "xlabs", "hcp", "processor", "candle")

#: the metadata that determines how tensors are read; all other fields only describe the file
_DECIDING = frozenset({
    "alpha", "lora_adapter_metadata", "rs_lora", "ss_network_args", "ss_network_dim",
    CANDLE_ALPHA, CANDLE_MODULES, STORED_ALPHA,
})  # fmt: skip


def deciding_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a file's metadata that reading depends on; `read` uses nothing else of it."""
    return {
        name: value
        for name, value in metadata.items()
        if name in _DECIDING or value == "<embed>" or name.startswith("mflux")
    }


def read(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, object] | None = None,
    *,
    name: str | None = None,
    trainer_exact: bool = False,
    alpha: Alphas | None = None,
) -> Adapter:
    """Read named tensors into an `Adapter`.

    ``name`` selects one adapter if the keys carry several PEFT adapter names. ``trainer_exact`` scales kohya
    `split_qkv` files as their trainer did instead of as every loader does. ``alpha`` is for modules whose alpha the
    file does not state (`inweave.formats.alphas`).
    """
    supplied = None if alpha is None else SuppliedAlphas.of(alpha)
    every_field = dict(metadata or {})
    metadata = deciding_metadata(every_field)
    if not tensors:
        raise FormatError("the file holds no tensors")
    if (kind := foreign_kind(tensors, metadata)) is not None:
        raise FormatError(kind)
    learn_suffixes()
    keys, carried, problems = _split_all(tensors, metadata)
    if _is_strange(keys, problems) and load_algorithms():
        learn_suffixes()
        keys, carried, problems = _split_all(tensors, metadata)
    shared = _file_tensors(tensors)
    _refuse_checkpoint(keys, tensors)
    every, (keys, chosen) = keys, _choose_name(keys, name)
    others = {key.raw for key in every} - {key.raw for key in keys}
    context = Context(
        metadata=metadata,
        peft=from_adapter_config(config) if config else None,
        components=from_metadata(metadata),
        trainer_exact=trainer_exact,
        shared=shared,
    )
    entries: list[Entry] = []
    groups = _grouped(keys, tensors, problems, metadata, _located(keys))
    context.packed = packed_modules(groups, context)
    for group in groups:
        classify(group, context, entries, problems)
    entries = candle_alphas(entries, metadata)
    entries = entries if supplied is None else supply_alphas(entries, supplied)
    assumed = [entry for entry in entries if assumes_alpha(entry)]
    entries = restore_alphas(entries, metadata, assumed)
    for algorithm in ALGORITHMS.values() if shared else ():
        unused = tuple(key for key in shared if key.endswith(algorithm.file_suffixes))
        if unused and context.used_shared.isdisjoint(unused):
            problems.append(KeyProblem("orphan", unused, algorithm.unused_file_tensors))
    return Adapter(
        entries=tuple(entries),
        carried=carried,
        metadata=every_field,
        config=config,
        problems=tuple(problems),
        warnings=tuple(
            _file_warnings(metadata, chosen, keys, carried, others)
            + _config_warnings(context, entries)
            + assumption_warnings(assumed)
            + context.warnings
        ),
        tensors={key: tensor for key, tensor in tensors.items() if key not in others} if others else tensors,
        assumed_alphas=tuple(dict.fromkeys(str(entry.ref) for entry in assumed)),
    )


def read_container(
    container: Container, *, name: str | None = None, trainer_exact: bool = False, alpha: Alphas | None = None
) -> Adapter:
    """Read the adapter in an opened file or directory; errors name its path."""
    options: dict[str, Any] = {"name": name, "trainer_exact": trainer_exact, "alpha": alpha}
    try:
        adapter = read(container.tensors, container.metadata, container.config, **options)
    except (FormatError, ConfigError) as error:
        raise type(error)(f"{container.path}: {error}") from None
    return replace(adapter, places=container.places)


def _refuse_checkpoint(keys: list[Key], tensors: Mapping[str, Tensor]) -> None:
    """Raise FormatError for a model: only plain weights, not under PEFT's prefix (which has `modules_to_save`)."""
    plain = sum(1 for key in keys if key.role in ("plain_weight", "plain_bias", "scale"))
    if plain == len(keys) > 0 and not any(name.startswith("base_model.") for name in tensors):
        raise FormatError(
            f"{checkpoint_kind(tensors)}, not an adapter: {len(tensors):,} plain tensors and none of an adapter "
            "(to make an adapter from a tuned checkpoint, extract the difference to its base)"
        )


def _file_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that belong to all modules of an algorithm."""
    suffixes = tuple(suffix for algorithm in ALGORITHMS.values() for suffix in algorithm.file_suffixes)
    return {key: tensor for key, tensor in tensors.items() if key.endswith(suffixes)}


def _is_strange(keys: list[Key], problems: list[KeyProblem]) -> bool:
    """Return whether an algorithm of another package may know more about these keys."""
    return any(each.fault == "unknown" for each in problems) or any(key.role == "plain_weight" for key in keys)


def _split_all(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[list[Key], dict[str, Tensor], list[KeyProblem]]:
    keys: list[Key] = []
    carried: dict[str, Tensor] = {}
    problems: list[KeyProblem] = []
    unsupported: dict[str, list[str]] = {}
    shared = _file_tensors(tensors)
    for raw, tensor in tensors.items():
        if raw in shared:
            continue
        twin = ".modules_to_save." in raw and raw.replace(".modules_to_save.", ".") in tensors
        passenger = raw.startswith(_PASSENGERS) or raw == "emb_params" or metadata.get(raw) == "<embed>"
        # PEFT repeats some modules, and saves an adapted embedding's own weight next to its factors
        repeated = twin or ".original_module." in raw or raw.endswith(".base_layer.weight")
        if passenger or repeated:
            carried[raw] = tensor
            continue
        key = split(raw)
        if key is None:
            problems.append(KeyProblem("unknown", (raw,), "no known adapter suffix ends this key"))
        elif key.role in _NOT_MERGEABLE:
            unsupported.setdefault(_NOT_MERGEABLE[key.role], []).append(raw)
        else:
            keys.append(key)
    problems += [KeyProblem("unsupported", tuple(names), reason) for reason, names in unsupported.items()]
    return keys, carried, problems


def _choose_name(keys: list[Key], requested: str | None) -> tuple[list[Key], str | None]:
    names = Counter(key.name for key in keys if key.name is not None)
    if requested is not None and requested not in names:
        known = _listed(names) or "none"
        raise FormatError(f"no adapter named {requested!r} in this file; the keys carry: {known}")
    if len(names) > 1 and requested is None:
        raise FormatError(f"the file holds the adapters {_listed(names)}; choose one by name (--adapter)")
    chosen = requested or next(iter(names), None)
    return [key for key in keys if key.name in (None, chosen)], chosen


def _listed(names: Collection[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:20]) + (f" and {len(ordered) - 20} more" if len(ordered) > 20 else "")


def _located(keys: list[Key]) -> dict[str, tuple[Ref, str]]:
    """Return the module and the prefix's dialect of each module name; other packages may know an unknown prefix."""
    modules = dict.fromkeys(key.module for key in keys)
    located = {module: locate(module) for module in modules}
    strange = any(not located[key.module][1] and key.family not in _NO_PREFIX for key in keys)
    return {module: locate(module) for module in modules} if strange and load_dialects() else located


def _grouped(
    keys: list[Key],
    tensors: Mapping[str, Tensor],
    problems: list[KeyProblem],
    metadata: Mapping[str, str],
    located: Mapping[str, tuple[Ref, str]],
) -> list[Group]:
    record = json_object(metadata.get(CANDLE_MODULES))
    groups: dict[object, Group] = {}
    candle_ids: dict[str, set[int]] = {}
    glora = _glora_modules(keys)
    keys = sorted(keys, key=lambda key: key.raw)  # the choice between duplicates must not depend on the file's order
    for key in keys:
        if key.family == "candle" and key.module not in glora:
            candle_ids.setdefault(key.module, set()).add(key.index or 0)
    for key in keys:
        role, identity, ref, prefix = key.role, None, None, ""
        if key.family == "cloneofsimo":
            ref = Ref("unet" if key.module == "unet" else "te1", f"#{key.index}")
        elif key.family == "candle" and key.module not in glora:
            ids = candle_ids[key.module]
            recorded = record.get(f"{key.module}.{key.index}")
            if isinstance(recorded, str):
                ref = Ref("", recorded)
            elif is_candle_path(key.module):
                ref = candle_home(key.module, many=len(ids) > 1)
            else:
                ref = Ref("", key.module, below=len(ids) > 1)
            role = {"candle_a": "down", "candle_b": "up", "candle_m": "magnitude"}[role]
            if key.module.endswith("lora_embed") or ref.name.endswith(("embed_tokens", "word_embeddings")):
                role = {"down": "emb_down", "up": "emb_up"}.get(role, role)
            identity = (key.module, key.index)
        else:
            if key.family == "candle":
                role = f"g_{key.role[-1]}{key.index}"
            ref, prefix = located[key.module]
            if role == "oft_blocks" and key.index is not None:
                role = f"oft_blocks.{key.index}"
        group = groups.setdefault(identity or ref, Group(ref, prefix))
        if role in group.tensors:
            problems.append(
                KeyProblem("duplicate", (key.raw,), f"the same part of {ref} is also stored as {group.keys[role]}")
            )
            continue
        group.add(role, key, tensors[key.raw])
    position = {name: number for number, name in enumerate(tensors)}
    return sorted(groups.values(), key=lambda group: min(position[raw] for raw in group.keys.values()))


def _glora_modules(keys: list[Key]) -> set[str]:
    """Return the modules with a1, a2, b1 and b2 but no a0, which are GLoRA; candle-lora counts from 0."""
    seen: dict[str, set[tuple[str, int]]] = {}
    for key in keys:
        if key.family == "candle" and key.index is not None:
            seen.setdefault(key.module, set()).add((key.role[-1], key.index))
    whole = {("a", 1), ("a", 2), ("b", 1), ("b", 2)}
    return {module for module, ids in seen.items() if ids & whole and not any(i == 0 or i > 2 for _, i in ids)}


def _config_warnings(context: Context, entries: list[Entry]) -> list[str]:
    """Return warnings about tensors that adapter_config.json lists and the file lacks, and about its unknown fields."""
    configs = [config for config in (context.peft, *context.components.values()) if config is not None]
    warnings = list(dict.fromkeys(warning for config in configs for warning in config.warnings))
    if context.peft is None:
        return warnings
    for algorithm in ALGORITHMS.values():
        modules = {entry.ref.name for entry in entries if type(entry.factors) is algorithm}
        warnings += filter(None, [algorithm.missing(context.peft, modules)])
    return warnings


def _file_warnings(
    metadata: Mapping[str, str],
    chosen: str | None,
    keys: list[Key],
    carried: Mapping[str, Tensor],
    others: Collection[str],
) -> list[str]:
    warnings: list[str] = []
    if others:
        warnings.append(f"{len(others)} tensors of other adapters in this file are not read, only those of {chosen!r}")
    if "alpha" in metadata:
        warnings.append(f"metadata holds a bare alpha ({metadata['alpha'][:40]}), which inweave ignores, as loaders do")
    if any(key.endswith(".base_layer.weight") for key in carried):
        warnings.append(
            "the adapter includes the weights of layers it adapts (base_layer.weight): the base's are used instead"
        )
    if is_true(network_args(metadata).get("split_qkv")):
        warnings.append(
            "trained with split_qkv: loaders scale it by alpha / (parts * rank), its trainer by alpha / rank; "
            "the loaders' value is used unless trainer_exact is set"
        )
    if chosen is not None and chosen != "default":
        warnings.append(f"the keys carry the adapter name {chosen!r}")
    return warnings
