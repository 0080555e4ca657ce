"""Which parts of a model are made of this package's classes, for images and training on the CPU.

    libraries   importing diffusers and transformers takes longer than an image of the embedded model, and 200 MB
    plain       the same networks, tensor names and operations in the same order: equal outputs, bit for bit

A part is exchanged if every setting of its configuration is known here, with a value that the class computes; the
others keep their library's class. Quantized bases, GPUs and diffusers' pipelines always have the libraries' classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

from inweave.errors import FormatError
from inweave.models.blueprint import Blueprint, NetworkBlueprint
from inweave.models.configuration import diffusers_config
from inweave.models.folder import TokenizerFolder
from inweave.models.sd.autoencoder import AutoencoderKL
from inweave.models.sd.clip import CLIPTextModel
from inweave.models.sd.network import PlainNetwork
from inweave.models.sd.tokenizer import is_plain, read_tokenizer
from inweave.models.sd.unet import UNet2DConditionModel

#: by the names that the libraries and configurations give them
CLASSES: Mapping[str, type[PlainNetwork]] = {
    kind.__name__: kind for kind in (AutoencoderKL, CLIPTextModel, UNet2DConditionModel)
}


def without_libraries(blueprint: Blueprint) -> Blueprint:
    """Return the blueprint with the classes of this package where they compute the same."""
    parts = {folder: _plain_part(part) for folder, part in blueprint.parts.items()}
    tokenizers = {folder: _plain_tokenizer(make) for folder, make in blueprint.tokenizers.items()}
    return replace(blueprint, parts=parts, tokenizers=tokenizers)


def is_covered(class_name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a configuration has a class here that computes the same as the library's."""
    kind = CLASSES.get(class_name)
    if kind is None:
        return False
    arguments = signature(kind).parameters
    settings = {name: value for name, value in config.items() if not name.startswith("_") and name not in kind.unused}
    others = {name: value for name, value in settings.items() if name not in arguments}
    if not settings.keys() >= arguments.keys() or others != dict(kind.fixed):
        return False
    try:
        diffusers_config(class_name, kind, settings)
    except FormatError:  # an argument has another type: the library may accept it
        return False
    return kind.fits(config)


def _plain_part(part: NetworkBlueprint) -> NetworkBlueprint:
    if not is_covered(part.class_name, part.config):
        return part
    return replace(part, library=CLASSES[part.class_name].__module__)


def _plain_tokenizer(make: Any) -> Any:
    if isinstance(make, TokenizerFolder) and is_plain(make.folder, make.class_name):
        return lambda: read_tokenizer(make.folder)
    return make
