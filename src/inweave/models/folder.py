"""A diffusers folder as a blueprint.

    model_index.json            "unet": ["diffusers", "UNet2DConditionModel"], ...
    unet/config.json, *.safetensors (or shards with an index)
    tokenizer/, scheduler/scheduler_config.json

Only JSON, tokenizer text and safetensors are read. Parts inweave does not use (safety checker, image encoder) are left
where they are. Any part may come from a file of its own instead, in either naming.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, FormatError
from inweave.formats.files import network_file, read_json
from inweave.models.blueprint import CLASSES, COMPONENTS, Blueprint, Part, check_complete, family_of
from inweave.models.variants import Variant, find_variant
from inweave.targets.index import SINGLE_FILE_PREFIXES, component_from_names
from inweave.weights.source import FileSource, Renamed, WeightSource

Config = tuple[str, Mapping[str, Any]]  # class name, configuration
Places = Mapping[str, "str | os.PathLike[str]"]

_TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast", "T5Tokenizer", "T5TokenizerFast")


def open_folder(
    folder: Path, *, name: str | None = None, variant: Variant | None = None, parts: Places | None = None
) -> Blueprint:
    """The blueprint of a model in diffusers' layout; ``parts`` have files of their own."""
    index_file = folder / "model_index.json"
    if not index_file.is_file():
        raise FormatError(f"{folder}: no model_index.json; a diffusers model folder has one")
    index = read_json(index_file)
    given = dict(parts or {})
    found: dict[str, Part] = {}
    tokenizers: dict[str, Callable[[], Any]] = {}
    for part, said in index.items():
        if not isinstance(said, list) or len(said) != 2 or not isinstance(said[1], str):
            continue
        if part in COMPONENTS or part == "vae":
            place = given.pop(part, None)
            config = (known_class(folder / part, said[1]), read_json(folder / part / "config.json"))
            found[part] = (
                Part(part, *config, FileSource(_weights(folder / part)))
                if place is None
                else given_part(Path(place), part, config)
            )
        elif part.startswith("tokenizer"):
            tokenizers[part] = tokenizer_at(folder / part, said[1])
    if given:
        raise ConfigError(f"{folder}: model_index.json has no part {min(given)!r}; its parts are {', '.join(found)}")
    denoiser = found.get("transformer") or found.get("unet")
    if denoiser is None:
        raise FormatError(f"{folder}: model_index.json names no unet and no transformer")
    blueprint = Blueprint(
        name or folder.name,
        family_of(denoiser.class_name, denoiser.config),
        found,
        tokenizers,
        read_json(folder / "scheduler" / "scheduler_config.json"),
        folder,
        variant or _variant(folder, index, denoiser),
        {key: value for key, value in index.items() if not key.startswith("_") and not isinstance(value, list)},
        (f"model_index.json says {index.get('_class_name')}",),
    )
    check_complete(blueprint)
    return blueprint


def given_part(place: Path, part: str, config: Config) -> Part:
    """One network from a file or folder of its own, or out of a whole checkpoint."""
    source = FileSource(_weights(place) if place.is_dir() else place)
    wanted = "te3" if config[0] == "T5EncoderModel" else COMPONENTS.get(part, part)
    names = source.names()
    prefix = next(
        (p for p, found in SINGLE_FILE_PREFIXES if found == wanted and any(name.startswith(p) for name in names)), ""
    )
    return Part(part, *config, under_prefix(source, prefix, part))


def under_prefix(source: FileSource, prefix: str, part: str) -> WeightSource:
    """The tensors below ``prefix`` under diffusers' names; without one, those that no other network claims."""
    others = () if prefix else tuple(other for other, _ in SINGLE_FILE_PREFIXES)
    inside = {
        name[len(prefix) :]: source.spec(name).shape
        for name in source.names()
        if name.startswith(prefix) and not name.startswith(others)
    }
    return Renamed(source, component_from_names(COMPONENTS.get(part, part), inside, prefix))


def known_class(place: Path, class_name: str) -> str:
    if class_name not in CLASSES:
        raise FormatError(f"{place}: a network of class {class_name!r}; known are {', '.join(CLASSES)}")
    return class_name


def _weights(folder: Path) -> Path:
    found = network_file(folder)
    if found is None:
        pickles = [found.name for pattern in ("*.bin", "*.ckpt", "*.pt") for found in folder.glob(pattern)]
        told = f"; {pickles[0]} is a pickle, which inweave never opens" if pickles else ""
        raise FormatError(f"{folder}: no .safetensors weights{told}")
    return found


def tokenizer_at(place: Path, class_name: str) -> Callable[[], Any]:
    """How to make a tokenizer, when it is needed."""
    if class_name not in _TOKENIZERS:
        raise FormatError(f"{place}: a tokenizer of class {class_name!r}; known are CLIP's and T5's")
    return partial(_tokenizer, place, class_name)


def _tokenizer(place: Path, class_name: str) -> Any:
    import transformers

    try:
        return getattr(transformers, class_name).from_pretrained(place, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise FormatError(f"{place}: this tokenizer cannot be read: {error}") from None


def _variant(folder: Path, index: Mapping[str, Any], denoiser: Part) -> Variant | None:
    """A known variant, by the repository the folder was saved from or the folder's own name, if it may be that."""
    said = index.get("_name_or_path")
    family = family_of(denoiser.class_name, denoiser.config)
    inpaint = denoiser.config.get("in_channels") == 9
    for text in (said if isinstance(said, str) else "", folder.name):
        found = find_variant(text) if text else None
        if found is not None and (found.family, found.inpaint) == (family, inpaint):
            return found
    return None
