"""Everything a diffusion model needs besides its weights, shipped with the package: nothing is downloaded.

    configs/variants.json       variant -> folder -> [class, component]
    configs/components/*.json   one configuration each, in the format of diffusers and transformers
    configs/tokenizers/         the vocabularies of CLIP and T5, compressed

A family of another package names the package that has such a `configs` folder for its variants (`Family.package`).

CLIP's vocabulary is its merges in order: 256 bytes, the same bytes at the end of a word, one entry per merge,
then the start and end token. So only the merges are stored.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inweave.errors import ConfigError
from inweave.models.families import families, family_named
from inweave.models.families.base import Variant
from inweave.models.lazy_imports import defer_imports
from inweave.models.variants import find_variant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Config = dict[str, Any]

_DIFFUSERS = "0.42.0"  # the version whose format this is; diffusers repairs what older ones wrote
#: class of a tokenizer -> folder of its compressed vocabulary
_VOCABULARIES = {"CLIPTokenizer": "clip", "T5TokenizerFast": "t5", "T5Tokenizer": "t5"}


def variants() -> tuple[str, ...]:
    """Return the names of all variants that can be built."""
    return tuple(_table())


def folders(variant: str | Variant) -> tuple[str, ...]:
    """Return the parts of a variant, by the names of their folders."""
    return tuple(_table()[_variant(variant).name])


def component_config(variant: str | Variant, folder: str) -> tuple[str, Config]:
    """Return class name and configuration of one part.

    A `Variant` holds more than its name: what a file's model was trained to predict goes into the scheduler.
    """
    known = _variant(variant)
    parts = _table()[known.name]
    if folder not in parts:
        raise ConfigError(f"{known.name} has no {folder!r}; its parts are {', '.join(parts)}")
    class_name, component = parts[folder]
    file = _data(family_named(known.family).package, "components", f"{component}.json")
    config: Config = json.loads(file.read_text("utf-8"))
    if folder == "scheduler" and known.prediction != "flow":
        config["prediction_type"] = known.prediction
        if known.zero_terminal_snr:  # the last step must be sampled, or its pure noise is never seen
            config |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
            if class_name == "PNDMScheduler":  # the one that cannot
                class_name = config["_class_name"] = "DDIMScheduler"
    return class_name, config


def tokenizer(variant: str | Variant, folder: str = "tokenizer") -> PreTrainedTokenizerBase:
    """Return the tokenizer of a text encoder, ready for use."""
    import transformers

    class_name, config = component_config(variant, folder)
    if not folder.startswith("tokenizer"):
        raise ConfigError(f"{folder!r} is a {class_name}, not a tokenizer; component_config has its configuration")
    with tempfile.TemporaryDirectory(prefix="inweave-tokenizer-") as temporary:
        _write_tokenizer(Path(temporary), class_name, config)
        with defer_imports():
            made: PreTrainedTokenizerBase = getattr(transformers, class_name).from_pretrained(temporary)
    made.name_or_path = _variant(variant).repo  # not the folder that is gone
    return made


def has_vocabulary(class_name: str) -> bool:
    """Return whether the vocabulary of this tokenizer class comes with the package."""
    return class_name in _VOCABULARIES


def write_skeleton(variant: str | Variant, folder: Path) -> Path:
    """Write a diffusers folder that lacks only the weights; one that has an index already is left alone."""
    known = _variant(variant)
    if (folder / "model_index.json").exists():
        raise ConfigError(f"{folder} is a diffusers folder already (it has a model_index.json); name another one")
    family = family_named(known.family)
    index: Config = {
        "_class_name": family.inpaint_pipeline if known.inpaint else family.pipeline,
        "_diffusers_version": _DIFFUSERS,
        **family.index_settings(known),
    }
    for part in folders(known):
        class_name, config = component_config(known, part)
        path = folder / part
        path.mkdir(parents=True, exist_ok=True)
        if part.startswith("tokenizer"):
            _write_tokenizer(path, class_name, config)
        else:
            _write_json(path / ("scheduler_config.json" if part == "scheduler" else "config.json"), config)
        index[part] = ["diffusers" if "_class_name" in config else "transformers", class_name]
    _write_json(folder / "model_index.json", dict(sorted(index.items())))
    return folder


def _write_tokenizer(folder: Path, class_name: str, config: Config) -> None:
    vocabulary = _VOCABULARIES.get(class_name)
    if vocabulary is None:
        raise ConfigError(
            f"{class_name}: its vocabulary does not come with the package; use a diffusers folder that has the "
            "tokenizer, or add its own folder (--part tokenizer=FOLDER)"
        )
    _write_json(folder / "tokenizer_config.json", config)
    if vocabulary == "clip":
        merges = _unpacked("clip", "merges.txt.gz")
        (folder / "merges.txt").write_text(merges, "utf-8", newline="\n")
        _write_json(folder / "vocab.json", clip_vocabulary(merges), indent=None)
    else:
        (folder / "tokenizer.json").write_text(_unpacked(vocabulary, "tokenizer.json.gz"), "utf-8", newline="\n")


def clip_vocabulary(merges: str) -> dict[str, int]:
    """Return token -> id, from the text of merges.txt."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = 256 - len(visible)  # invisible bytes are written as the characters after the first 256
    letters = [chr(number) for number in (*visible, *range(256, 256 + hidden))]
    pairs = [line.split() for line in merges.splitlines()[1:]]
    words = [*letters, *(f"{letter}</w>" for letter in letters), *(left + right for left, right in pairs)]
    return {word: number for number, word in enumerate((*words, "<|startoftext|>", "<|endoftext|>"))}


def _variant(variant: str | Variant) -> Variant:
    known = variant if isinstance(variant, Variant) else find_variant(variant)
    if known is None or known.name not in _table():
        raise ConfigError(f"no variant is called {variant!r}; known are {', '.join(_table())}")
    return known


@cache
def _table() -> dict[str, dict[str, tuple[str, str]]]:
    table: dict[str, dict[str, tuple[str, str]]] = {}
    for package in dict.fromkeys(family.package for family in families()):
        document = json.loads(_data(package, "variants.json").read_text("utf-8"))
        table |= {name: {part: tuple(entry) for part, entry in parts.items()} for name, parts in document.items()}
    return table


def _data(package: str, *path: str) -> Traversable:
    return resources.files(package).joinpath("configs", *path)


def _unpacked(*path: str) -> str:
    return gzip.decompress(_data("inweave.models", "tokenizers", *path).read_bytes()).decode("utf-8")


def _write_json(path: Path, document: object, indent: int | None = 2) -> None:
    path.write_text(json.dumps(document, indent=indent, ensure_ascii=False) + "\n", "utf-8", newline="\n")
