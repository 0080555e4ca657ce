"""The published models whose tensors inweave knows, and the networks of each, from `catalog.json`.

    "networks": {"sd1-te": {"component": "te1", "listing": "clip-l", "table": "own", "prefix": ...}}
    "bases": {"sd1.5": {"networks": [{"listing": "unet-sd1.5", "table": "unet"}, "sd1-te"], "aliases": [...], ...}}

A network of a base is a shared one by name, or its fields; component and prefix default to those of a denoiser. A
base is a set of names and shapes: models that share them are one base, and ``same_tensors`` lists those that no file
can tell apart. Earlier bases win ties between bases that an adapter fits equally well. A family of another package
(`inweave.families`) brings the listings of its own bases. Hub ids, site labels and trainers' strings are in
`aliases.json` (`inweave.targets.aliases`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from inweave.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KnownNetwork:
    """One network of a base: its listing, table, and prefix inside a single-file checkpoint."""

    component: str
    listing: str
    table: str
    prefix: str
    only_original: str = ""  # listing of parts that single files have and diffusers folders lack
    other_folder: str = ""  # listing of parts that diffusers keeps in another folder
    one_naming: bool = False  # without a table because original checkpoints have these names too, not for want of one


@dataclass(frozen=True, slots=True)
class Known:
    """A base: its networks, and the names under which it is known."""

    name: str
    parts: tuple[KnownNetwork, ...]
    aliases: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()  # its names in trainers' metadata
    variant_of: str = ""  # the base this one differs from in its input layers only
    experts: int = 1  # denoisers of the same names and shapes: Wan 2.2 has one for high and one for low noise
    language_model: KnownNetwork | None = None  # encodes the prompts; it comes as a folder or a file of its own
    same_tensors: tuple[str, ...] = ()  # published models with the same names and shapes
    in_comfyui: bool = True  # ComfyUI@01f03bbd has a model class of it (comfy/supported_models.py)

    in_diffusers: bool = True  # diffusers has a model class of it
    #: of a model that grew out of a language model: the modules that only it has, which tell their adapters apart
    own_modules: tuple[str, ...] = ()

    @property
    def networks(self) -> tuple[KnownNetwork, ...]:
        """All networks that an adapter may change."""
        return self.parts if self.language_model is None else (*self.parts, self.language_model)


def _network(fields: str | dict[str, Any], shared: dict[str, dict[str, Any]]) -> KnownNetwork:
    """Return a network by its fields, or by its name among the ``shared`` ones."""
    if isinstance(fields, str):
        fields = shared[fields]
    return KnownNetwork(**{"component": "unet", "prefix": "model.diffusion_model.", **fields})


def _read_catalog() -> list[Known]:
    document = json.loads(resources.files(__package__).joinpath("catalog.json").read_text("utf-8"))
    shared = document["networks"]
    bases = []
    for name, fields in document["bases"].items():
        parts = tuple(_network(network, shared) for network in fields.pop("networks"))
        if model := fields.pop("language_model", None):
            fields["language_model"] = _network(model, shared)
        more: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
        }
        bases.append(Known(name, parts, **more))
    return bases


KNOWN = _read_catalog()
BY_NAME = {known.name: known for known in KNOWN}
#: the listings of other packages' families, by name
OUTSIDE_LISTINGS: dict[str, dict[str, list[int]]] = {}


@cache
def load_outside_bases() -> bool:
    """Add the bases that families of other packages list, once; return whether there are any.

    Called for names and files that the built-in bases do not explain.
    """
    from inweave.plugins import load_plugins

    group = "inweave.families"
    for plugin, family in load_plugins(group).items():
        table = str(getattr(family, "table", "own"))
        for name, tensors in dict(getattr(family, "listings", {})).items():
            if name in BY_NAME:
                raise ConfigError(f"plugin {plugin!r} ({group}): a base is called {name!r} already")
            network = KnownNetwork("unet", name, table, "model.diffusion_model.")
            OUTSIDE_LISTINGS[name] = {tensor: [int(size) for size in shape] for tensor, shape in tensors.items()}
            BY_NAME[name] = Known(name, (network,), in_comfyui=False)
            KNOWN.append(BY_NAME[name])
    return bool(OUTSIDE_LISTINGS)
