"""The families of diffusion models: to add one, write its file here and list its instance in `BUILT_IN`.

Another package adds one through an entry point, `[project.entry-points."inweave.families"]`, whose object is an
instance of `inweave.models.families.base.Family`. Its families are asked first, so that one can claim a relative of a
built-in model.

    family_of("UNet2DConditionModel", config) -> the family of a denoiser
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from inweave.errors import ConfigError, FormatError
from inweave.models.families.base import Family, Network
from inweave.models.families.chroma import CHROMA
from inweave.models.families.flux import FLUX
from inweave.models.families.flux2 import FLUX2, FLUX2_KLEIN
from inweave.models.families.qwen_image import QWEN_IMAGE
from inweave.models.families.qwen_image_edit import QWEN_IMAGE_EDIT
from inweave.models.families.sd import SD
from inweave.models.families.sd3 import SD3
from inweave.models.families.sdxl import SDXL
from inweave.models.families.z_image import Z_IMAGE
from inweave.plugins import load_plugins

BUILT_IN: tuple[Family, ...] = (SD, SDXL, SD3, FLUX, CHROMA, FLUX2, FLUX2_KLEIN, Z_IMAGE, QWEN_IMAGE, QWEN_IMAGE_EDIT)
GROUP = "inweave.families"


@cache
def families() -> tuple[Family, ...]:
    """Return every family in the order they are asked.

    Raises:
        ConfigError: one problem for each family of another package that is broken, incomplete, or uses a taken name.
    """
    plugins: list[Family] = []
    problems: list[str] = []
    owners = {label: "inweave" for family in BUILT_IN for label in _labels(family)}
    libraries = {network.class_name: network.library for family in BUILT_IN for network in family.networks}
    for name, plugin in load_plugins(GROUP).items():
        if not isinstance(plugin, Family):
            problems.append(f"plugin {name!r} ({GROUP}): expected an instance of Family, got {type(plugin).__name__}")
            continue
        if missing := [field for field in Family.__annotations__ if not hasattr(plugin, field)]:
            problems.append(f"plugin {name!r} ({GROUP}): the family does not set {', '.join(missing)}")
            continue
        clashes = [f"{label} is taken by {owners[label]}" for label in _labels(plugin) if label in owners]
        clashes += [
            f"the network class {network.class_name!r} is taken by {libraries[network.class_name]}"
            for network in plugin.networks
            if libraries.setdefault(network.class_name, network.library) != network.library
        ]
        problems += [f"plugin {name!r} ({GROUP}): {clash}" for clash in clashes]
        owners |= dict.fromkeys(_labels(plugin), f"plugin {name!r}")
        plugins.append(plugin)
    if problems:
        raise ConfigError(problems)
    return (*plugins, *BUILT_IN)


def _labels(family: Family) -> list[str]:
    """Return the names that no other family may use."""
    models = (name for variant in family.variants for name in (variant.name, *variant.aliases))
    return [
        f"the family name {family.name!r}",
        *(f"the model name {name!r}" for name in dict.fromkeys(models)),
        *(f"the preset name {name!r}" for name in family.presets),
    ]


@cache
def network_classes() -> dict[str, Network]:
    """Return the network classes a model may name; nothing else is ever imported for a file."""
    classes: dict[str, Network] = {}
    for network in (network for family in families() for network in family.networks):
        classes.setdefault(network.class_name, network)
    return classes


@cache
def tokenizer_classes() -> tuple[str, ...]:
    """Return the tokenizer classes a model may name."""
    return tuple(dict.fromkeys(name for family in families() for name in family.tokenizers))


def family_of(class_name: str, config: Mapping[str, Any], pipeline: object = "") -> Family:
    """Return the family a denoiser belongs to; of several that have it, the one of the pipeline."""
    if matching := [family for family in families() if family.recognizes(class_name, config)]:
        return next((family for family in matching if family.pipeline == pipeline), matching[0])
    known = dict.fromkeys(family.networks[0].class_name for family in families())
    raise FormatError(f"the denoiser is a {class_name!r}, which inweave cannot run; it runs {', '.join(known)}")


def family_named(name: str) -> Family:
    """Return the family of a variant."""
    return next(family for family in families() if family.name == name)
