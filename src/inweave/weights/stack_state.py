"""The present state of a live model's weights: the stack merged into them, and tensors whose contents are uncertain."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from inweave.targets.plan import Plan
from inweave.weights.factors import LoadedAdapter
from inweave.weights.program import LoadedStack, MergeProgram
from inweave.weights.stack import Item, Strength, TensorKey

Signature = tuple[tuple[int, float], ...]  #: (identity of a placement, strength) of everything a tensor received


@dataclass(slots=True)
class StackState:
    """The state of the weights; replaced as a whole, so that an interrupt never leaves half of it.

    ``stack``: held, so that the ids in use stay unique. ``program``: what wrote it, if it was one launch;
    ``signatures`` are then computed only if a later stack shares something with this one. ``uncertain``: tensors that
    are being written; if that ends early, their contents are not known.
    """

    stack: LoadedStack = ()
    signatures: dict[TensorKey, Signature] | None = field(default_factory=dict)
    program: MergeProgram | None = None
    uncertain: frozenset[TensorKey] = frozenset()

    def changed(self) -> Collection[TensorKey]:
        """Return the tensors that differ from the base."""
        known = self.program.tensors.keys() if self.signatures is None and self.program else self.received().keys()
        return known | self.uncertain if self.uncertain else known

    def received(self) -> dict[TensorKey, Signature]:
        """Return what each changed tensor received."""
        if self.signatures is None:
            assert self.program is not None
            self.signatures = {
                key: tuple((number, self.stack[layer][1].at(p, {})) for number, layer, p in rows)
                for key, rows in self.program.tensors.items()
            }
        return self.signatures

    def during(self, keys: Collection[TensorKey]) -> StackState:
        """Return the same state while ``keys`` are being written."""
        return StackState(self.stack, self.signatures, self.program, self.uncertain | frozenset(keys))

    def without(self, key: TensorKey) -> StackState:
        """Return the same state with one tensor at its base."""
        others = {each: signature for each, signature in self.received().items() if each != key}
        return StackState(self.stack, others, None, self.uncertain - {key})


def signatures_of(items: Mapping[TensorKey, Sequence[Item]]) -> dict[TensorKey, Signature]:
    """Return what every tensor receives, in a form that can be compared."""
    return {key: tuple((id(i.placement), i.strength) for i in received) for key, received in items.items()}


def owners_of(stack: LoadedStack) -> dict[int, LoadedAdapter]:
    """Map the id of each placement to its adapter."""
    return {id(p): loaded for loaded, _ in stack for p in loaded.plan.placements}


def plan_and_strength(item: tuple[LoadedAdapter, Strength]) -> tuple[Plan, Strength]:
    """Return the pair by which `canonical` orders the items of a stack."""
    return item[0].plan, item[1]
