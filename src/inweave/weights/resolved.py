"""An adapter of a stack, resolved: its tensors, their places and its strength."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from inweave.adapter import Adapter
from inweave.errors import TargetError
from inweave.exchange.resolve import resolve
from inweave.formats.files import maps_of, open_container, refuse_truncated
from inweave.formats.read import read_container
from inweave.targets.index import ModelIndex
from inweave.targets.plan import Plan
from inweave.weights.stack import AdapterLike, StackEntry, StackItem, Strength


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


def resolve_all(layers: list[StackItem], index: ModelIndex) -> Future[list[ResolvedItem]]:
    """Resolve the stack in another thread while weights are copied, which releases the GIL."""
    stack: Future[list[ResolvedItem]] = Future()

    def work() -> None:
        try:
            stack.set_result([resolve_item(adapter, strength, index) for adapter, strength in layers])
        except BaseException as error:
            stack.set_exception(error)

    if layers:
        threading.Thread(target=work, name="inweave-resolve", daemon=True).start()
    else:
        stack.set_result([])
    return stack


def plans_of(stack: Future[list[ResolvedItem]]) -> Future[Iterable[StackEntry]]:
    """Return the plans and strengths of a stack that is being resolved."""
    plans: Future[Iterable[StackEntry]] = Future()

    def hand_on(done: Future[list[ResolvedItem]]) -> None:
        if (error := done.exception()) is not None:
            plans.set_exception(error)
        else:
            plans.set_result([(each.plan, each.strength) for each in done.result()])

    stack.add_done_callback(hand_on)
    return plans
