"""The families of diffusion models, in the order they are asked: to add one, write its file and list it here.

family_of("UNet2DConditionModel", config) -> the family of a denoiser
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.errors import FormatError
from inweave.models.families.base import Family
from inweave.models.families.flux import FLUX
from inweave.models.families.qwen_image import QWEN_IMAGE
from inweave.models.families.sd import SD
from inweave.models.families.sd3 import SD3
from inweave.models.families.sdxl import SDXL
from inweave.models.families.z_image import Z_IMAGE

FAMILIES: tuple[Family, ...] = (SD, SDXL, SD3, FLUX, Z_IMAGE, QWEN_IMAGE)

#: network classes a model may name, and the library of each; nothing else is ever imported for a file
CLASSES = {network.class_name: network.library for family in FAMILIES for network in family.networks}

#: network class -> the language model in it, where nothing else of it is used
TEXT_MODELS = {
    network.class_name: network.text_model for family in FAMILIES for network in family.networks if network.text_model
}

#: tokenizer classes a model may name
TOKENIZERS = tuple(dict.fromkeys(name for family in FAMILIES for name in family.tokenizers))


def family_of(class_name: str, config: Mapping[str, Any]) -> Family:
    """The family a denoiser belongs to."""
    for family in FAMILIES:
        if family.recognizes(class_name, config):
            return family
    known = dict.fromkeys(family.networks[0].class_name for family in FAMILIES)
    raise FormatError(f"the denoiser is a {class_name!r}, which inweave cannot run; it runs {', '.join(known)}")


def family_named(name: str) -> Family:
    """The family of a variant."""
    return next(family for family in FAMILIES if family.name == name)
