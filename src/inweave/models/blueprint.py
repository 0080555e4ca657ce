"""A model before it is built: its parts with their configurations and weight sources.

    where ──► folder   a diffusers folder            (model_index.json, one sub-folder a part)
          ──► single   one checkpoint file           (configurations come with the package)
          ──► hub      an id such as owner/name      (only where downloading is allowed)
          ──► "inweave/emoji"                           the model inside the package

Whatever it was, the result is the same blueprint in diffusers' names, so nothing later asks where it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inweave.errors import FormatError
from inweave.models.variants import Family, Variant
from inweave.weights.source import WeightSource

#: classes a model may name, and the library each comes from; nothing else is ever imported for a file
CLASSES = {
    "UNet2DConditionModel": "diffusers",
    "SD3Transformer2DModel": "diffusers",
    "FluxTransformer2DModel": "diffusers",
    "AutoencoderKL": "diffusers",
    "CLIPTextModel": "transformers",
    "CLIPTextModelWithProjection": "transformers",
    "T5EncoderModel": "transformers",
}

#: part of a diffusers folder -> component of an adapter
COMPONENTS = {
    "unet": "unet", "transformer": "unet", "text_encoder": "te1", "text_encoder_2": "te2", "text_encoder_3": "te3",
}  # fmt: skip

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


@dataclass(frozen=True, slots=True)
class Part:
    """One network: which class, how configured, from which weights."""

    folder: str
    class_name: str
    config: Mapping[str, Any]
    source: WeightSource


@dataclass(frozen=True, slots=True)
class Blueprint:
    name: str
    family: Family
    parts: Mapping[str, Part]
    tokenizers: Mapping[str, Callable[[], Any]]  # made when the model is built
    scheduler: Mapping[str, Any]
    path: Path
    variant: Variant | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the whole pipeline, from model_index.json
    evidence: tuple[str, ...] = ()

    @property
    def denoiser(self) -> Part:
        return self.parts["transformer"] if "transformer" in self.parts else self.parts["unet"]

    def with_parts(self, parts: Mapping[str, Part]) -> Blueprint:
        return replace(self, parts={**self.parts, **parts})


def family_of(class_name: str, config: Mapping[str, Any]) -> Family:
    """The family a denoiser belongs to."""
    if class_name == "UNet2DConditionModel":
        return "sdxl" if config.get("addition_embed_type") == "text_time" else "sd"
    if class_name == "SD3Transformer2DModel":
        return "sd3"
    if class_name == "FluxTransformer2DModel":
        return "flux"
    raise FormatError(
        f"a denoiser of class {class_name!r}: inweave generates with UNet2DConditionModel (SD 1.5, 2, XL), "
        "SD3Transformer2DModel and FluxTransformer2DModel"
    )


#: the parts a family cannot do without
NEEDED: dict[Family, tuple[str, ...]] = {
    "sd": ("unet", "vae", "text_encoder"),
    "sdxl": ("unet", "vae", "text_encoder", "text_encoder_2"),
    "sd3": ("transformer", "vae", "text_encoder", "text_encoder_2"),
    "flux": ("transformer", "vae", "text_encoder", "text_encoder_2"),
}


def check_complete(blueprint: Blueprint) -> None:
    missing = [name for name in NEEDED[blueprint.family] if name not in blueprint.parts]
    if missing:
        raise FormatError(
            f"{blueprint.name}: {', '.join(missing)} missing; this file holds {', '.join(blueprint.parts)} only. "
            f"Give the others their own files: parts={{{missing[0]!r}: 'file.safetensors'}} (--part {missing[0]}=FILE)"
        )
