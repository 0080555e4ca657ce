"""The base models inweave knows by name, from a compact index that ships with the package.

`listings/*.json` hold names and shapes of each network in its finer naming (`inweave.targets.compact`); the
other naming follows from the tables. Nothing here needs weights or a download.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import resources

from inweave.errors import ConfigError
from inweave.targets.aliases import bases_named
from inweave.targets.catalog import BY_NAME, KNOWN, OUTSIDE_LISTINGS, Known, KnownNetwork
from inweave.targets.compact import Shape, expand, expand_inner
from inweave.targets.index import Component, ModelIndex
from inweave.targets.links import Naming
from inweave.targets.tables import TABLES

__all__ = ["KNOWN", "Known", "KnownNetwork", "find", "holds", "known_index", "listed_modules", "listing", "same_names"]


def find(name: str) -> Known | None:
    """Return a known base by name or alias, ignoring a remark in parentheses; None also if a name fits several
    bases.
    """
    names = bases_named(name)
    return BY_NAME[names[0]] if len(names) == 1 else None


def known_index(name: str, naming: Naming = "diffusers") -> ModelIndex:
    """Return the shipped index of a base, as a diffusers folder or as a single-file checkpoint."""
    names = bases_named(name)
    if len(names) > 1:
        raise ConfigError(f"{name!r} can be any of several base models: {', '.join(names)}; name one of them")
    if not names:
        every = ", ".join(k.name for k in KNOWN)
        matches = difflib.get_close_matches(name[:100].lower(), BY_NAME, 1)
        near = f"; did you mean {matches[0]!r}?" if matches else ""
        raise ConfigError(f"unknown base model {name!r}{near}; use one of {every}, or the path of a checkpoint")
    known = BY_NAME[names[0]]
    components = {part.component: _component(part, naming) for part in known.networks}
    if known.experts == 2 and naming == "diffusers":  # a single file holds one of them
        components["unet2"] = replace(components["unet"], name="unet2")
    return ModelIndex(components, known.name, known.name)


@lru_cache(maxsize=256)
def _component(part: KnownNetwork, naming: Naming) -> Component:
    shapes = dict(listing(part.listing))
    if part.other_folder:
        shapes.update(listing(part.other_folder))
    missing: frozenset[str] = frozenset()
    if part.only_original:
        extra = listing(part.only_original)
        shapes.update(extra)
        missing = frozenset(extra) if naming == "diffusers" else missing
    table = TABLES[part.table]
    prefix = part.prefix if naming == "original" else ""
    return Component(part.component, table, naming, shapes, "diffusers", prefix, missing)


def condensed_component(part: KnownNetwork) -> Component:
    """Return one network with its outermost stack of blocks as one block: the same names, a fraction of them.

    A UNet's blocks differ from each other, and its table needs all of them.
    """
    if part.table == "unet":
        return _component(part, "diffusers")
    listings = [packed_listing(name) for name in (part.listing, part.other_folder, part.only_original) if name]
    shapes = {name: shape for packed in listings for name, shape in expand_inner(packed).items()}
    return Component(part.component, TABLES[part.table], "diffusers", shapes)


@lru_cache(maxsize=256)
def listing(name: str) -> dict[str, Shape]:
    """Return names and shapes of one network, from the package's data."""
    return expand(packed_listing(name))


def listed_modules(name: str) -> frozenset[str]:
    """Return the module names of one network with '#' for every number, without expanding the listing."""
    return frozenset(
        re.sub(r"\[[\d,-]+\]|\d+", "#", tensor.rpartition(".")[0] or tensor) for tensor in packed_listing(name)
    )


def same_names(index: ModelIndex) -> Known | None:
    """Return the base a model is known as, or the listed one without a table whose modules it has in other sizes."""
    known = find(index.base) if index.base else None
    if known is not None or index.denoiser is None:
        return known
    modules = {re.sub(r"\d+", "#", tensor.rpartition(".")[0] or tensor) for tensor in index.denoiser.shapes}
    unnamed = (known for known in KNOWN if known.parts[0].table == "own")
    return next((known for known in unnamed if modules <= listed_modules(known.parts[0].listing)), None)


def holds(shapes: Mapping[str, Shape], name: str) -> bool:
    """Return whether ``shapes`` has every tensor of a listing; one tensor of each row decides most cases."""
    last = {re.sub(r"\[[\d,-]*?(\d+)\]", r"\1", row): shape for row, shape in packed_listing(name).items()}
    quick = all(shapes.get(tensor) == tuple(shape) for tensor, shape in last.items())
    return quick and listing(name).items() <= shapes.items()


@lru_cache(maxsize=256)
def packed_listing(name: str) -> dict[str, list[int]]:
    """Return the listing of one network as shipped (`inweave.targets.compact`)."""
    if name in OUTSIDE_LISTINGS:
        return OUTSIDE_LISTINGS[name]
    text = resources.files("inweave.targets").joinpath("listings", f"{name}.json").read_text("utf-8")
    tensors: dict[str, list[int]] = json.loads(text)["tensors"]
    return tensors
