"""Open an adapter file or a base model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from inweave.adapter import Adapter
from inweave.adapter.components import FOLDERS
from inweave.arguments import expect
from inweave.errors import ConfigError, FormatError
from inweave.files.paths import as_path, exists, is_file, is_folder, occupied
from inweave.formats.alphas import Alphas, lacks_alpha
from inweave.formats.base_shapes import base_shapes
from inweave.formats.files import open_container, shard_files, weight_files
from inweave.formats.gguf import is_gguf
from inweave.formats.read import read_container
from inweave.targets.bases import KNOWN, Known, find, holds, known_index, listing
from inweave.targets.catalog import load_outside_bases
from inweave.targets.index import Component, ModelIndex, component_from_names, index_from_names
from inweave.targets.links import Naming, Shape


def load(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    trainer_exact: bool = False,
    alpha: Alphas | None = None,
) -> Adapter:
    """Read an adapter in any dialect.

    Args:
        path: a .safetensors file, an index of shards, or a directory.
        name: the adapter to read if the keys carry several PEFT adapter names.
        trainer_exact: scale kohya `split_qkv` files as their trainer did, instead of as every loader does.
        alpha: the alpha of modules for which the file does not state one, as in a PEFT file without its
            adapter_config.json: a number, or {rank or pattern: number} with "*" for all others.

    Returns:
        The adapter; ``adapter.assumed_alphas`` names the modules for which alpha = rank is assumed.

    Raises:
        FormatError: the file cannot be read, or is not an adapter.
        ConfigError: ``alpha`` is invalid, or no module needs it.
    """
    expect("name", name, str, type(None))
    expect("trainer_exact", trainer_exact, bool)
    return read_container(open_container(path), name=name, trainer_exact=trainer_exact, alpha=alpha)


def alphas_for(paths: Iterable[str | os.PathLike[str]], alpha: Alphas) -> list[Alphas | None]:
    """Return ``alpha`` for each file that lacks an alpha, None for the others; raise ConfigError if none lacks one."""
    lacking = [any(lacks_alpha(entry) for entry in load(path)) for path in paths]
    if not any(lacking):
        raise ConfigError("alpha: every module of these adapters states its own alpha, so none can be supplied")
    return [alpha if lacks else None for lacks in lacking]


def open_base(base: str | os.PathLike[str], naming: Naming = "diffusers") -> ModelIndex:
    """Return the index of a base model: a known name, a checkpoint file, an index of shards, or a folder."""
    path = as_path(base)
    text = os.fspath(base)
    if not occupied(path):
        if find(text) is not None:
            return known_index(text, naming)
        if text.endswith((".safetensors", ".json")) or os.sep in text:
            raise ConfigError(f"{text}: no such file or directory, and no base model has this name")
        return known_index(text, naming)  # raises, listing the known names
    if is_folder(path):
        return _with_base_name(_open_folder(path))
    return _with_base_name(index_from_names(_shapes(path), source=text))


def open_weights(path: str | os.PathLike[str]) -> ModelIndex:
    """Return the index of a model on disk, for work that needs its weights: the name of a base is not enough."""
    file = as_path(path)
    if not exists(file):
        raise ConfigError(f"{path}: no such file or folder; the weights themselves are needed, not the name of a base")
    packed = [each for each in _files_of(file) if each != file and is_file(each) and is_gguf(each)]
    if packed:
        raise ConfigError(f"{packed[0]}: a GGUF file within a folder; name the file itself")
    return open_base(path)


def _files_of(path: Path) -> list[Path]:
    """Return the weight files of a checkpoint, of a folder, or of the folders of a diffusers model."""
    if is_folder(path):
        folders = [path / name for name in component_folders(path)] or [path]
        return [file for folder in folders for first in weight_files(folder)[:1] for file in _files_of(first)]
    return shard_files(path) if path.name.endswith(".index.json") else [path]


def component_folders(model: Path) -> dict[str, str]:
    """Return the subfolders of a diffusers model that contain weights, with the component of each."""
    folders: dict[str, str] = {}
    for name, component in FOLDERS.items():
        if component not in folders.values() and weight_files(model / name):
            folders[name] = component
    return folders


def _open_folder(folder: Path) -> ModelIndex:
    folders = component_folders(folder)
    if folders:
        shapes = {component: _shapes(weight_files(folder / name)[0]) for name, component in folders.items()}
        return ModelIndex({name: component_from_names(name, each) for name, each in shapes.items()}, source=str(folder))
    files = weight_files(folder)
    if not files:
        raise FormatError(f"{folder}: no .safetensors weights in this folder")
    return index_from_names(_shapes(files[0]), source=str(folder))


def _shapes(path: Path) -> dict[str, Shape]:
    """Return the shapes of the tensors in a file, or in the shards of an index."""
    files = _files_of(path)
    return {name: shape for file in files for name, shape in base_shapes(file).items()}


def _with_base_name(index: ModelIndex) -> ModelIndex:
    """Identify a known base by its denoiser's tensors."""
    first = index.denoiser or index.components.get("model") or next(iter(index.components.values()), None)
    if first is None:
        raise FormatError(f"{index.source}: no network in this file that an adapter could apply to")
    best = _largest_within(first.diffusers)
    if best is None and load_outside_bases():
        best = _largest_within(first.diffusers)
    if best is not None and best[0] >= 0.8 * len(first.diffusers):
        components = dict(index.components)
        if "model" in components and "unet" in known_index(best[1].name).components:
            components["unet"] = replace(components.pop("model"), name="unet")
        return ModelIndex(components, best[1].name, index.source)
    return _rooted(index, first) if "model" in index.components else index


def _rooted(index: ModelIndex, component: Component) -> ModelIndex:
    """Identify a denoiser whose files put its tensors below a root of their own, such as `model.`."""
    for root in sorted({known.parts[0].prefix for known in KNOWN if known.own_modules}):
        shapes = {name.removeprefix(root): size for name, size in component.shapes.items() if name.startswith(root)}
        if (best := _largest_within(shapes)) is not None:
            rooted = replace(component, name="unet", shapes=shapes, prefix=root)
            return ModelIndex({"unet": rooted}, best[1].name, index.source)
    return index


def _largest_within(shapes: Mapping[str, Shape]) -> tuple[int, Known] | None:
    """Return the largest known base whose denoiser's tensors are all among ``shapes``, with their number."""
    best: tuple[int, Known] | None = None
    for known in KNOWN:
        name = known.parts[0].listing
        if holds(shapes, name) and (best is None or len(listing(name)) > best[0]):
            best = len(listing(name)), known
    return best
