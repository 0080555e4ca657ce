"""The base that a file's metadata declares: trainers' architecture strings, hub ids, names of model files.

architecture   modelspec.architecture, ss_base_model_version, the module of the trainer, PEFT's base_model_name_or_path:
               written by the program that loaded the model; a contradiction is reported
hint           names of files and titles, written by people: they only decide between bases that fit equally
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from inweave.targets.aliases import bases_named
from inweave.targets.catalog import BY_NAME, KNOWN

_ARCHITECTURE = (
    "modelspec.architecture", "ss_base_model_version", "base_model", "baseModel", "base_model_name_or_path",
    "ot_model_type", "model_type", "architecture",
)  # fmt: skip
_OPEN = ("base_model", "baseModel", "base_model_name_or_path", "model_type", "architecture")  # any model may be named
_HINTS = ("ss_sd_model_name", "modelspec.title", "ss_output_name")
_WORD = re.compile(r"[a-z]*")
_EMPTY = ("", "none", "null", "unknown", "custom", "other", "undefined")
#: network module of sd-scripts and musubi-tuner -> the architecture that it trains
_NETWORK_MODULES = {
    "lora_flux": "flux1", "oft_flux": "flux1", "lora_flux_2": "flux.2", "lora_wan": "wan2.1",
    "lora_framepack": "framepack", "lora_qwen_image": "qwen-image", "lora_zimage": "z-image",
    "lora_hv_1_5": "hunyuan-video-1.5", "lora_krea2": "krea2", "lora_kandinsky": "kandinsky-5", "lora_sd3": "sd 3.5",
    "lora_lumina": "lumina2", "lora_hunyuan_image": "hunyuan-image-2.1", "lora_anima": "anima",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Declaration:
    """One field of the metadata, its value, and the known bases that it can mean."""

    field: str
    label: str
    bases: tuple[str, ...]
    hint: bool = False

    def __str__(self) -> str:
        return f"{self.field} is {self.label[:80]!r}"


def declarations(metadata: Mapping[str, str], config: Mapping[str, object] | None = None) -> list[Declaration]:
    """Return what a file's metadata and adapter_config.json declare about its base, the most reliable first."""
    made = []
    for field, label in _labels(metadata, config or {}):
        bases = _bases(label)
        if bases or field not in (*_OPEN, *_HINTS):
            made.append(Declaration(field, label, bases, field in _HINTS))
    return made


def model_of(base: str) -> str:
    """Return the base that ``base`` is a variant of, or itself."""
    return BY_NAME[base].variant_of or base if base in BY_NAME else base


_ONE_FAMILY = {"sana-video": "sana", "longcat": "flux"}  # table -> that of its family


def family_of(base: str) -> str:
    """Return the name table of a base, or the first word of its name if it has none: versions of one architecture."""
    part = BY_NAME[base].parts[0]
    if part.table == "own":
        return _WORD.match(part.listing)[0]  # type: ignore[index]
    return _ONE_FAMILY.get(part.table, part.table)


def contradicts(declaration: Declaration, base: str) -> bool:
    """Return whether ``declaration`` names another model than ``base``, or one that is not known."""
    if declaration.hint:
        return False
    if len(declaration.bases) > 1:  # a label of several bases names their family
        return family_of(base) not in {family_of(other) for other in declaration.bases}
    return model_of(base) not in {model_of(other) for other in declaration.bases}


def _labels(metadata: Mapping[str, str], config: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    packed = _object(metadata.get("lora_adapter_metadata", ""))
    paths = {"base_model_name_or_path": config.get("base_model_name_or_path")}
    paths |= {key: value for key, value in packed.items() if key.endswith("base_model_name_or_path")}
    for field, value in [(field, metadata.get(field)) for field in _ARCHITECTURE] + list(paths.items()):
        if isinstance(value, str) and value.strip().lower() not in _EMPTY:
            yield field.rpartition(".")[2] if field.endswith("base_model_name_or_path") else field, value.strip()
    module = metadata.get("ss_network_module", "").rpartition(".")[2]
    if module in _NETWORK_MODULES:
        yield "ss_network_module", _NETWORK_MODULES[module]
    for field in _HINTS:
        if value := metadata.get(field, "").strip():
            yield field, value


def _object(text: str) -> dict[str, object]:
    """Return the JSON object in ``text``, empty if there is none."""
    try:
        document = json.loads(text) if text[:1] == "{" else {}
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


@lru_cache(maxsize=4096)  # a collection has few labels and many files
def _bases(label: str) -> tuple[str, ...]:
    """Return the bases of a label; a trainer's string may go on after the part that is known (`flux1-dev/lora`)."""
    plain = re.sub(r"\.(safetensors|ckpt|gguf)$", "", label.lower()[:200])
    plain = re.sub(r"/(lora|lokr|loha|locon|lycoris|dora|textual-inversion|oft)$", "", plain)
    if bases := bases_named(plain):
        return tuple(dict.fromkeys(bases))
    names = {_words(each) for each in (plain, plain.rpartition("/")[2])}
    marks = [(len(mark), base) for mark, base in _marks() if any(_begins(name, mark) for name in names)]
    longest = max(marks, default=(0, ""))[0]
    return tuple(dict.fromkeys(base for length, base in marks if length == longest))


@cache
def _marks() -> tuple[tuple[str, str], ...]:
    return tuple((_words(mark), known.name) for known in KNOWN for mark in known.marks)


def _words(label: str) -> str:
    """Return the words and numbers of a label with one mark between them: FLUX.2 [klein] 4B -> flux-2-klein-4-b."""
    return "-".join(re.findall(r"[a-z]+|[0-9]+", label))


def _begins(name: str, mark: str) -> bool:
    """Return whether a label is a mark, maybe with more words; a number after a word is another version."""
    rest = name.removeprefix(mark)
    return name.startswith(mark) and (not rest or (rest[0] == "-" and (mark[-1].isdigit() or not rest[1].isdigit())))
