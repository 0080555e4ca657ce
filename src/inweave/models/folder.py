"""A diffusers folder as a blueprint.

    model_index.json            "unet": ["diffusers", "UNet2DConditionModel"], ...
    unet/config.json, *.safetensors (or shards with an index)
    tokenizer/, scheduler/scheduler_config.json

Only JSON, tokenizer text and safetensors are read. Parts inweave does not use (safety checker, image encoder) are
ignored. Any part may come from a file of its own instead, in either naming.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inweave.adapter.components import FOLDERS
from inweave.errors import ConfigError, FormatError
from inweave.files.paths import is_file, is_folder
from inweave.formats.files import network_file
from inweave.models.blueprint import Blueprint, NetworkBlueprint, check_complete
from inweave.models.configuration import read_config
from inweave.models.families import family_named, family_of, network_classes, tokenizer_classes
from inweave.models.families.base import ENCODERS, Family, Variant
from inweave.models.lazy_imports import defer_imports
from inweave.models.samplers import checked_scheduler
from inweave.models.tokenizers import make_tokenizer
from inweave.models.variants import find_variant
from inweave.targets.index import SINGLE_FILE_PREFIXES, component_from_names
from inweave.weights.packed import open_source
from inweave.weights.source import Renamed, WeightSource

NETWORKS = (*FOLDERS, "vae")
TOKENIZER_FOLDERS = tuple(folder.replace("text_encoder", "tokenizer") for folder in ENCODERS)
Config = tuple[str, Mapping[str, Any]]  # class name, configuration
#: processors for text and images, in whose folders the tokenizer is a tokenizer.json, read without the library's class
_PROCESSORS = ("PixtralProcessor",)
PartFiles = Mapping[str, "str | os.PathLike[str]"]


def open_folder(
    folder: Path, *, name: str | None = None, variant: Variant | None = None, parts: PartFiles | None = None
) -> Blueprint:
    """Return the blueprint of a model in diffusers' layout; ``parts`` are read from other files."""
    index_file = folder / "model_index.json"
    if not is_file(index_file):
        raise FormatError(f"{folder}: no model_index.json; a diffusers model folder has one")
    index = read_config(index_file)
    files = dict(parts or {})
    networks: dict[str, NetworkBlueprint] = {}
    tokenizers: dict[str, Callable[[], Any]] = {}
    for part, class_name in index_entries(index):
        if part in NETWORKS:
            file = files.pop(part, None)
            if class_name not in (known := network_classes()):
                raise FormatError(
                    f"{folder / part}: a network of class {class_name!r:.80}; known are {', '.join(known)}"
                )
            config = (class_name, read_config(folder / part / "config.json"))
            if file is None:
                networks[part] = NetworkBlueprint(part, *config, open_source(weights_of(folder / part)))
            else:
                networks[part] = part_from_file(Path(file), part, config)
        elif part in TOKENIZER_FOLDERS:
            tokenizers[part] = tokenizer_at(Path(files.pop(part, folder / part)), class_name)
    if files:
        parts_there = ", ".join((*networks, *tokenizers))
        raise ConfigError(f"{folder}: model_index.json has no part {min(files)!r}; its parts are {parts_there}")
    denoiser = networks.get("transformer") or networks.get("unet")
    if denoiser is None:
        raise FormatError(f"{folder}: model_index.json names no unet and no transformer")
    family = family_of(denoiser.class_name, denoiser.config, index.get("_class_name"))
    check_pipeline(str(folder), index.get("_class_name"), variant, denoiser, family)
    networks = {part: as_declared(family, network) for part, network in networks.items()}
    settings = folder / "scheduler" / "scheduler_config.json"
    scheduler = checked_scheduler(str(settings), read_config(settings), flow=family.flow)
    chosen = variant or _variant(folder, index, denoiser, family)
    evidence = (f"model_index.json names {index.get('_class_name')}",)
    options = pipeline_settings(index)
    label = name or folder.name
    blueprint = Blueprint(label, family, networks, tokenizers, scheduler, folder, chosen, options, evidence)
    check_complete(blueprint)
    return blueprint


def check_pipeline(
    where: str, pipeline: object, variant: Variant | None, denoiser: NetworkBlueprint, family: Family
) -> None:
    """Raise FormatError if a folder's pipeline is that of a relative of its family, or not that of the variant."""
    try:
        family.refuse_relative(pipeline)
    except FormatError as error:
        raise FormatError(f"{where}: model_index.json: {error}") from None
    if variant is None or variant.family == family.name:
        return
    other = family_named(variant.family)
    if other.recognizes(denoiser.class_name, denoiser.config):
        raise FormatError(
            f"{where}: model_index.json names {pipeline}, so this is {family.name}; {variant.name} has the same "
            f"denoiser, but its pipeline is {other.pipeline}. Leave out --variant, or take a folder of {variant.name}"
        )


def as_declared(family: Family, part: NetworkBlueprint) -> NetworkBlueprint:
    """Return a network as its family builds it, where another family builds another model out of the same class."""
    own = next((each for each in family.networks if each.class_name == part.class_name), None)
    if own is None or not own.text_model or own.text_model == network_classes()[part.class_name].text_model:
        return part
    return replace(part, class_name=own.text_model, library=own.library)


def index_entries(index: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (part, class name) for every part of a model_index.json."""
    for part, entry in index.items():
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str):
            yield part, entry[1]


def pipeline_settings(index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the whole pipeline in a model_index.json."""
    return {key: value for key, value in index.items() if not key.startswith("_") and isinstance(value, bool | None)}


def part_from_file(path: Path, part: str, config: Config) -> NetworkBlueprint:
    """Return one network of a separate file or folder, or of a whole checkpoint."""
    source = open_source(weights_of(path) if is_folder(path) else path)
    component = "te3" if config[0] == "T5EncoderModel" else FOLDERS.get(part, part)
    names = source.names()
    prefixes = (prefix for prefix, each in SINGLE_FILE_PREFIXES if each == component)
    prefix = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in names)), "")
    return NetworkBlueprint(part, *config, under_prefix(source, prefix, part))


def under_prefix(source: WeightSource, prefix: str, part: str) -> WeightSource:
    """Return the tensors below ``prefix`` under diffusers' names; without a prefix, those of no other network."""
    others = () if prefix else tuple(other for other, _ in SINGLE_FILE_PREFIXES)
    inside = {
        name[len(prefix) :]: source.spec(name).shape
        for name in source.names()
        if name.startswith(prefix) and not name.startswith(others)
    }
    return Renamed(source, component_from_names(FOLDERS.get(part, part), inside, prefix))


def weights_of(folder: Path) -> Path:
    """Return the safetensors file, or the index of its shards, in the folder of a network."""
    path = network_file(folder)
    if path is None:
        pickles = [pickle.name for pattern in ("*.bin", "*.ckpt", "*.pt") for pickle in folder.glob(pattern)]
        remark = f"; {pickles[0]} is a pickle, which inweave never opens" if pickles else ""
        raise FormatError(f"{folder}: no .safetensors weights{remark}")
    return path


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """Makes the tokenizer of a folder when it is called."""

    folder: Path
    class_name: str

    def __call__(self) -> Any:
        return _tokenizer(self.folder, self.class_name)


def _tokenizer(folder: Path, class_name: str) -> Any:
    import transformers

    with defer_imports():
        kind = "PreTrainedTokenizerFast" if class_name in _PROCESSORS else class_name
        return make_tokenizer(folder, getattr(transformers, kind))


def tokenizer_at(folder: Path, class_name: str) -> TokenizerFolder:
    """Return a function that makes the tokenizer."""
    if class_name not in (known := tokenizer_classes()):
        raise FormatError(f"{folder}: a tokenizer of class {class_name!r:.80}; known are {', '.join(known)}")
    return TokenizerFolder(folder, class_name)


def _variant(folder: Path, index: Mapping[str, Any], denoiser: NetworkBlueprint, family: Family) -> Variant | None:
    """Return the variant named by the folder's original repository or its own name, if its family and inputs agree."""
    repository = index.get("_name_or_path")
    inpaint = denoiser.config.get("in_channels") == 9
    for text in (repository if isinstance(repository, str) else "", folder.name):
        variant = find_variant(text) if text else None
        if variant is not None and (variant.family, variant.inpaint) == (family.name, inpaint):
            return variant
    return next((each for each in family.variants if each.pipeline == index.get("_class_name") != ""), None)
