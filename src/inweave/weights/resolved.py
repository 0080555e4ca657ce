"""An adapter of a stack, resolved: what to weave, where it goes, how strongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inweave.exchange.resolve import resolve
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
    if isinstance(adapter, Plan):
        return ResolvedLayer(adapter, adapter, strength)
    return ResolvedLayer(adapter, resolve(adapter, index), strength)
