"""A single-file checkpoint as a blueprint: the configurations come with the package, the names from the tables.

    file ──identify──► variant, parts ──► every part under diffusers' names, with the variant's configuration

Parts the file lacks (Flux files hold the transformer alone) come from files of their own. A model of unusual size
takes its configurations from a folder (``config``) in diffusers' layout; weights are not read there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, FormatError
from inweave.models import bundled
from inweave.models.blueprint import Blueprint, NetworkBlueprint, check_complete
from inweave.models.configuration import read_config
from inweave.models.families import family_named, family_of, network_classes, tokenizer_classes
from inweave.models.families.base import Variant
from inweave.models.folder import (
    NETWORKS,
    TOKENIZER_FOLDERS,
    Config,
    PartFiles,
    as_declared,
    check_pipeline,
    index_entries,
    part_from_file,
    pipeline_settings,
    tokenizer_at,
    under_prefix,
)
from inweave.models.identify import identify
from inweave.models.samplers import checked_scheduler
from inweave.targets.index import SINGLE_FILE_PREFIXES
from inweave.weights.packed import open_source, packed_summary, source_shapes


def open_single(
    path: Path,
    *,
    variant: Variant | None = None,
    config: str | os.PathLike[str] | None = None,
    parts: PartFiles | None = None,
) -> Blueprint:
    """Return the blueprint of a checkpoint; ``variant`` overrides the one identified by its tensors."""
    source = open_source(path)
    shapes = source_shapes(source)
    evidence: tuple[str, ...]
    chosen: Variant | None
    configs: Mapping[str, Config]
    if config is None:
        metadata = getattr(source, "metadata", {})
        identified = identify(shapes, metadata)
        if variant is None:
            names = (metadata.get(key) for key in ("modelspec.architecture", "modelspec.title"))
            _refuse_relative(path, identified.variant, path.stem, *names)
        known = variant or identified.variant
        chosen, prefixes, evidence = known, identified.parts, identified.evidence
        configs = {folder: bundled.component_config(known, folder) for folder in bundled.folders(known)}
        tokenizers: dict[str, Callable[[], Any]] = {
            folder: partial(bundled.tokenizer, known, folder)
            for folder, (class_name, _) in configs.items()
            if folder.startswith("tokenizer") and bundled.has_vocabulary(class_name)
        }
        settings: dict[str, Any] = {}
        pipeline: object = family_named(known.family).pipeline
    else:
        chosen = variant
        configs, tokenizers, settings, pipeline = _from_folder(Path(config))
        prefixes = _prefixes(shapes, configs)
        evidence = (f"configurations from {config}",)
    if summary := packed_summary(source):
        evidence += (summary,)
    networks = {
        folder: NetworkBlueprint(folder, *configs[folder], under_prefix(source, prefix, folder))
        for folder, prefix in prefixes.items()
        if folder in configs
    }
    for folder, file in (parts or {}).items():
        classes = (*network_classes(), *tokenizer_classes())
        known_parts = [part for part, (class_name, _) in configs.items() if class_name in classes]
        if folder not in known_parts:
            raise ConfigError(f"{path}: this model has no part {folder!r}; its parts are {', '.join(known_parts)}")
        if folder.startswith("tokenizer"):
            tokenizers[folder] = tokenizer_at(Path(file), configs[folder][0])
        else:
            networks[folder] = part_from_file(Path(file), folder, configs[folder])
    denoiser = networks.get("transformer") or networks.get("unet")
    if denoiser is None:
        raise FormatError(f"{path}: no denoiser in this file")
    family = family_of(denoiser.class_name, denoiser.config, pipeline)
    if config is not None:
        check_pipeline(str(config), pipeline, variant, denoiser, family)
    networks = {folder: as_declared(family, network) for folder, network in networks.items()}
    scheduler = checked_scheduler(f"{path}: its scheduler", configs["scheduler"][1], flow=family.flow)
    blueprint = Blueprint(path.stem, family, networks, tokenizers, scheduler, path, chosen, settings, evidence)
    check_complete(blueprint)
    return blueprint


def _refuse_relative(path: Path, variant: Variant, *names: object) -> None:
    """Refuse a file whose name or metadata says that it is a relative of the variant with the same tensors."""
    try:
        family_named(variant.family).refuse_relative(*names)
    except FormatError as error:
        raise FormatError(
            f"{path}: {error}; if this file is {variant.name} all the same, say so: --variant {variant.name}"
        ) from None


def _from_folder(folder: Path) -> tuple[dict[str, Config], dict[str, Callable[[], Any]], dict[str, Any], object]:
    index = read_config(folder / "model_index.json")
    configs: dict[str, Config] = {}
    tokenizers: dict[str, Callable[[], Any]] = {}
    for part, class_name in index_entries(index):
        if part in NETWORKS and class_name in network_classes():
            configs[part] = (class_name, read_config(folder / part / "config.json"))
        elif part == "scheduler":
            configs[part] = (class_name, read_config(folder / part / "scheduler_config.json"))
        elif part in TOKENIZER_FOLDERS:
            configs[part] = (class_name, {})
            tokenizers[part] = tokenizer_at(folder / part, class_name)
    if "scheduler" not in configs:
        raise FormatError(f"{folder}: model_index.json names no scheduler")
    return configs, tokenizers, pipeline_settings(index), index.get("_class_name")


def _prefixes(shapes: Mapping[str, tuple[int, ...]], configs: Mapping[str, Config]) -> dict[str, str]:
    """Return folder -> prefix for a model whose configurations come from a folder."""
    denoiser = "transformer" if "transformer" in configs else "unet"
    t5 = next((folder for folder, (class_name, _) in configs.items() if class_name == "T5EncoderModel"), "")
    folders = {"unet": denoiser, "te1": "text_encoder", "te2": "text_encoder_2", "te3": t5, "vae": "vae"}
    prefixes: dict[str, str] = {}
    for prefix, component in SINGLE_FILE_PREFIXES:
        folder = folders.get(component, "")
        if folder in configs and folder not in prefixes and any(name.startswith(prefix) for name in shapes):
            prefixes[folder] = prefix
    prefixes.setdefault(denoiser, "")
    return prefixes
