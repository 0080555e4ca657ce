"""An adapter of a stack, resolved: what to weave, where it goes, how strongly."""

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
class ResolvedLayer:
    """``adapter`` is what the caller passed: the key it is known by later."""

    adapter: AdapterLike
    plan: Plan
    strength: Strength


def resolve_layer(
    adapter: AdapterLike, strength: float | Mapping[str, float] | Strength, index: ModelIndex
) -> ResolvedLayer:
    """Resolve one adapter on a model; errors name its file."""
    strength = Strength.of(strength)
    if isinstance(adapter, Plan | Adapter):
        plan = adapter if isinstance(adapter, Plan) else resolve(adapter, index)
        refuse_truncated(maps_of(plan.adapter.tensors.values()), "the adapter's file")
        return ResolvedLayer(adapter, plan, strength)
    try:
        return ResolvedLayer(adapter, resolve(read_container(open_container(adapter, mapped=False)), index), strength)
    except TargetError as error:
        raise TargetError(f"{os.fspath(adapter)}: {error}") from None
