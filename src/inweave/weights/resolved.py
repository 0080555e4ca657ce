"""An adapter of a stack, resolved: what to weave, where it goes, how strongly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from inweave.adapter import Adapter
from inweave.errors import TargetError
from inweave.formats.files import open_container
from inweave.formats.read import read
from inweave.targets.index import ModelIndex
from inweave.targets.plan import Plan
from inweave.targets.resolve import resolve
from inweave.weights.stack import Strength

Given = Adapter | Plan | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Planned:
    adapter: Given  # as it was given: the key it is known by later
    plan: Plan
    strength: Strength


def planned(adapter: Given, strength: float | Mapping[str, float] | Strength, index: ModelIndex) -> Planned:
    """Resolve one adapter on a model; a file is named in what goes wrong."""
    wanted = Strength.of(strength)
    if isinstance(adapter, Plan):
        return Planned(adapter, adapter, wanted)
    if isinstance(adapter, Adapter):
        return Planned(adapter, resolve(adapter, index), wanted)
    container = open_container(adapter)
    found = replace(read(container.tensors, container.metadata, container.config), places=container.places)
    try:
        return Planned(adapter, resolve(found, index), wanted)
    except TargetError as error:
        raise TargetError(f"{os.fspath(adapter)}: {error}") from None
