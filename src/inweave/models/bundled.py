"""Everything a diffusion model needs besides its weights, shipped with the package: nothing is downloaded.

    configs/variants.json       variant -> folder -> [class, component]
    configs/components/*.json   one configuration each, in the format of diffusers and transformers
    configs/tokenizers/         the vocabularies of CLIP and T5, compressed

CLIP's vocabulary is its merges in order: 256 bytes, the same bytes at the end of a word, one entry a merge,
then the two marks around a text. So only the merges are stored.
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
from inweave.models.variants import Variant, find_variant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Config = dict[str, Any]

_PIPELINES = {
    ("sd", False): "StableDiffusionPipeline",
    ("sd", True): "StableDiffusionInpaintPipeline",
    ("sdxl", False): "StableDiffusionXLPipeline",
    ("sdxl", True): "StableDiffusionXLInpaintPipeline",
    ("sd3", False): "StableDiffusion3Pipeline",
    ("flux", False): "FluxPipeline",
}
_DIFFUSERS = "0.42.0"  # the version whose format this is; diffusers repairs what older ones wrote
_ABSENT = [None, None]  # how a pipeline's index says that it does without a part
_OPTIONS: dict[str, Config] = {
    "sd": {
        "feature_extractor": _ABSENT, "image_encoder": _ABSENT, "safety_checker": _ABSENT,
        "requires_safety_checker": False,
    },
    "sdxl": {"feature_extractor": _ABSENT, "image_encoder": _ABSENT, "force_zeros_for_empty_prompt": True},
}  # fmt: skip
_INPAINT_OPTIONS: dict[str, Config] = {"sdxl": {"requires_aesthetics_score": False}}


def variants() -> tuple[str, ...]:
    """The names of all variants that can be built."""
    return tuple(_table())


def folders(variant: str | Variant) -> tuple[str, ...]:
    """The parts of a variant, by the names of their folders."""
    return tuple(_table()[_variant(variant).name])


def component_config(variant: str | Variant, folder: str) -> tuple[str, Config]:
    """Class name and configuration of one part.

    A `Variant` says more than its name: what a file's schedule is trained for goes into the scheduler.
    """
    found = _variant(variant)
    parts = _table()[found.name]
    if folder not in parts:
        raise ConfigError(f"{found.name} has no {folder!r}; its parts are {', '.join(parts)}")
    class_name, component = parts[folder]
    config: Config = json.loads(_data("components", f"{component}.json").read_text("utf-8"))
    if folder == "scheduler" and found.prediction != "flow":
        config["prediction_type"] = found.prediction
        if found.zero_terminal_snr:  # the last step must be sampled, or its pure noise is never seen
            config |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
            if class_name == "PNDMScheduler":  # the one that cannot
                class_name = config["_class_name"] = "DDIMScheduler"
    return class_name, config


def tokenizer(variant: str | Variant, folder: str = "tokenizer") -> PreTrainedTokenizerBase:
    """The tokenizer of a text encoder, ready for use."""
    import transformers

    class_name, config = component_config(variant, folder)
    if not folder.startswith("tokenizer"):
        raise ConfigError(f"{folder!r} is no tokenizer but a {class_name}; component_config has its configuration")
    with tempfile.TemporaryDirectory(prefix="inweave-tokenizer-") as place:
        _write_tokenizer(Path(place), class_name, config)
        found: PreTrainedTokenizerBase = getattr(transformers, class_name).from_pretrained(place)
    found.name_or_path = _variant(variant).repo  # not the folder that is gone
    return found


def write_skeleton(variant: str | Variant, folder: Path) -> Path:
    """Write a diffusers folder that lacks only the weights; one that has an index already is left alone."""
    found = _variant(variant)
    if (folder / "model_index.json").exists():
        raise ConfigError(f"{folder} is a diffusers folder already (it has a model_index.json); name another one")
    index: Config = {"_class_name": _PIPELINES[found.family, found.inpaint], "_diffusers_version": _DIFFUSERS}
    index |= _OPTIONS.get(found.family, {}) | (_INPAINT_OPTIONS.get(found.family, {}) if found.inpaint else {})
    for part in folders(found):
        class_name, config = component_config(found, part)
        place = folder / part
        place.mkdir(parents=True, exist_ok=True)
        if part.startswith("tokenizer"):
            _write_tokenizer(place, class_name, config)
        else:
            _write_json(place / ("scheduler_config.json" if part == "scheduler" else "config.json"), config)
        index[part] = ["diffusers" if "_class_name" in config else "transformers", class_name]
    _write_json(folder / "model_index.json", dict(sorted(index.items())))
    return folder


def _write_tokenizer(place: Path, class_name: str, config: Config) -> None:
    _write_json(place / "tokenizer_config.json", config)
    if class_name == "CLIPTokenizer":
        merges = _unpacked("clip", "merges.txt.gz")
        (place / "merges.txt").write_text(merges, "utf-8", newline="\n")
        _write_json(place / "vocab.json", clip_vocabulary(merges), indent=None)
    else:
        (place / "tokenizer.json").write_text(_unpacked("t5", "tokenizer.json.gz"), "utf-8", newline="\n")


def clip_vocabulary(merges: str) -> dict[str, int]:
    """token -> number, from the text of merges.txt."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = 256 - len(shown)  # bytes that are no visible character stand for those after the first 256
    bytes_spelt = [chr(number) for number in (*shown, *range(256, 256 + hidden))]
    pairs = [line.split() for line in merges.splitlines()[1:]]
    words = [*bytes_spelt, *(f"{byte}</w>" for byte in bytes_spelt), *(left + right for left, right in pairs)]
    return {word: number for number, word in enumerate((*words, "<|startoftext|>", "<|endoftext|>"))}


def _variant(variant: str | Variant) -> Variant:
    found = variant if isinstance(variant, Variant) else find_variant(variant)
    if found is None or found.name not in _table():
        raise ConfigError(f"no variant is called {variant!r}; known are {', '.join(_table())}")
    return found


@cache
def _table() -> dict[str, dict[str, tuple[str, str]]]:
    document = json.loads(_data("variants.json").read_text("utf-8"))
    return {name: {part: tuple(said) for part, said in parts.items()} for name, parts in document.items()}


def _data(*path: str) -> Traversable:
    return resources.files("inweave.models").joinpath("configs", *path)


def _unpacked(*path: str) -> str:
    return gzip.decompress(_data("tokenizers", *path).read_bytes()).decode("utf-8")


def _write_json(path: Path, document: object, indent: int | None = 2) -> None:
    path.write_text(json.dumps(document, indent=indent, ensure_ascii=False) + "\n", "utf-8", newline="\n")
