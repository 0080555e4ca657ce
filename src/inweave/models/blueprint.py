"""A model before it is built: its parts with their configurations and weight sources.

    where ──► folder   a diffusers folder            (model_index.json, one sub-folder per part)
          ──► single   one checkpoint file           (configurations come with the package)
          ──► hub      an id such as owner/name      (only where downloading is allowed)
          ──► "inweave/emoji"                           the model inside the package

Whatever it was, the result is the same blueprint in diffusers' names, and nothing later depends on where it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inweave.errors import FormatError
from inweave.models.families.base import ENCODERS, Family, Variant
from inweave.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class NetworkBlueprint:
    """One network: which class, how configured, from which weights."""

    folder: str
    class_name: str
    config: Mapping[str, Any]
    source: WeightSource
    library: str = ""  # the module of the class, where no family declares it


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Everything needed to build a model; no weight has been read yet."""

    name: str
    family: Family
    parts: Mapping[str, NetworkBlueprint]
    tokenizers: Mapping[str, Callable[[], Any]]  # made when the model is built
    scheduler: Mapping[str, Any]
    path: Path
    variant: Variant | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the whole pipeline, from model_index.json
    evidence: tuple[str, ...] = ()

    @property
    def denoiser_config(self) -> Mapping[str, Any]:
        return self.denoiser.config

    @property
    def denoiser(self) -> NetworkBlueprint:
        return self.parts["transformer"] if "transformer" in self.parts else self.parts["unet"]


def check_complete(blueprint: Blueprint) -> None:
    """Refuse a model that lacks a network or a tokenizer its family cannot do without."""
    required = list(dict.fromkeys(network.folder for network in blueprint.family.networks if network.required))
    missing = [folder for folder in required if folder not in blueprint.parts]
    tokenizers = [folder.replace("text_encoder", "tokenizer") for folder in required if folder in ENCODERS]
    if unread := [folder for folder in tokenizers if folder not in blueprint.tokenizers]:
        options = " ".join((*(f"--part {folder}=FILE" for folder in missing), *(f"--part {t}=FOLDER" for t in unread)))
        raise FormatError(
            f"{blueprint.name}: {', '.join((*missing, *unread))} missing; this file holds only "
            f"{', '.join(blueprint.parts)}. Add {options} (`parts` in Python and in a training file); a tokenizer that "
            "does not come with inweave is a folder with vocab.json and merges.txt, or with tokenizer.json"
        )
    if missing:
        raise FormatError(
            f"{blueprint.name}: {', '.join(missing)} missing; this file holds only {', '.join(blueprint.parts)}. "
            f"Give the others their own files: parts={{{missing[0]!r}: 'file.safetensors'}} (--part {missing[0]}=FILE)"
        )
