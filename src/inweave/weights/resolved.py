"""An adapter of a stack, resolved: its tensors, their places and its strength."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from inweave.adapter import Adapter
from inweave.errors import TargetError
from inweave.exchange.resolve import resolve
from inweave.formats.files import maps_of, open_container, refuse_truncated
from inweave.formats.read import read_container
from inweave.targets.index import ModelIndex
from inweave.targets.plan import Plan
from inweave.weights.stack import AdapterLike, Strength


@dataclass(frozen=True, slots=True)
class ResolvedItem:
    """An adapter with its plan and strength; ``adapter`` is the caller's object, its key in the cache."""

    adapter: AdapterLike
    plan: Plan
    strength: Strength


def resolve_item(
    adapter: AdapterLike, strength: float | Mapping[str, float] | Strength, index: ModelIndex
) -> ResolvedItem:
    """Resolve one adapter on a model; errors name its file."""
    strength = Strength.of(strength)
    if isinstance(adapter, Plan | Adapter):
        plan = adapter if isinstance(adapter, Plan) else resolve(adapter, index)
        refuse_truncated(maps_of(plan.adapter.tensors.values()), "the adapter's file")
        return ResolvedItem(adapter, plan, strength)
    try:
        return ResolvedItem(adapter, resolve(read_container(open_container(adapter, mapped=False)), index), strength)
    except TargetError as error:
        raise TargetError(f"{os.fspath(adapter)}: {error}") from None
