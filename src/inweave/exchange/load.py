"""Open an adapter file or a base model, wherever it is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from inweave.adapter import Adapter
from inweave.errors import ConfigError, FormatError
from inweave.formats.files import network_file, open_container, read_header, shard_files
from inweave.formats.read import read
from inweave.targets.bases import KNOWN, Known, find, known_index
from inweave.targets.index import Component, ModelIndex, component_from_names, index_from_names
from inweave.targets.links import Naming, Shape

#: sub-folders of a diffusers model and the component each one holds
FOLDERS = {
    "unet": "unet", "transformer": "unet", "text_encoder": "te1", "text_encoder_2": "te2", "text_encoder_3": "te3",
}  # fmt: skip


def load(path: str | os.PathLike[str], *, name: str | None = None, trainer_exact: bool = False) -> Adapter:
    """Read an adapter in any dialect: a .safetensors file, shards, or a directory."""
    container = open_container(path)
    try:
        found = read(container.tensors, container.metadata, container.config, name=name, trainer_exact=trainer_exact)
        return replace(found, places=container.places)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def open_base(base: str | os.PathLike[str], naming: Naming = "diffusers") -> ModelIndex:
    """The index of a base model: a known name, a checkpoint file, an index of shards, or a folder."""
    text = os.fspath(base)
    place = Path(text)
    if not place.exists() and not place.is_symlink():
        if find(text) is not None:
            return known_index(text, naming)
        if text.endswith((".safetensors", ".json")) or os.sep in text:
            raise ConfigError(f"{text}: no such file or directory, and no base model has this name")
        return known_index(text, naming)  # raises, listing the known names
    if place.is_dir():
        return _named(_open_folder(place))
    shapes = _shards_shapes(place) if place.name.endswith(".index.json") else _shapes(place)
    return _named(index_from_names(shapes, source=text))


def _open_folder(folder: Path) -> ModelIndex:
    components: dict[str, Component] = {}
    for name, component in FOLDERS.items():
        if (folder / name).is_dir() and component not in components and (shapes := _folder_shapes(folder / name)):
            components[component] = component_from_names(component, shapes)
    if components:
        return ModelIndex(components, source=str(folder))
    shapes = _folder_shapes(folder)
    if not shapes:
        raise FormatError(f"{folder}: no .safetensors weights in this folder")
    return index_from_names(shapes, source=str(folder))


def _folder_shapes(folder: Path) -> dict[str, Shape]:
    place = network_file(folder)
    if place is None:
        return {}
    return _shards_shapes(place) if place.name.endswith(".index.json") else _shapes(place)


def _shards_shapes(index: Path) -> dict[str, Shape]:
    found: dict[str, Shape] = {}
    for shard in shard_files(index):
        found.update(_shapes(shard))
    return found


def _shapes(path: Path) -> dict[str, Shape]:
    return {name: span.shape for name, span in read_header(path).spans.items()}


def _named(index: ModelIndex) -> ModelIndex:
    """Recognise a known base by its denoiser's tensors."""
    first = index.denoiser or index.components.get("model") or next(iter(index.components.values()), None)
    if first is None:
        raise FormatError(f"{index.source}: no network in this file that an adapter could apply to")
    best: tuple[int, Known] | None = None
    for known in KNOWN:
        reference = known_index(known.name).components
        mine = reference.get("unet") or reference.get("model") or next(iter(reference.values()))
        needed = {part: shape for part, shape in mine.parts.items() if part not in mine.missing}
        if needed.items() <= first.parts.items() and (best is None or len(needed) > best[0]):
            best = len(needed), known
    if best is not None and best[0] >= 0.8 * len(first.parts):
        components = dict(index.components)
        if "model" in components and "unet" in known_index(best[1].name).components:
            components["unet"] = replace(components.pop("model"), name="unet")
        return ModelIndex(components, best[1].name, index.source)
    return index
