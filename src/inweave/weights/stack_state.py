"""The present state of a live model's weights: the stack merged into them, and tensors whose contents are uncertain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from inweave.errors import TargetError
from inweave.targets.plan import Plan
from inweave.weights.factors import LoadedAdapter
from inweave.weights.merge import overflow_of
from inweave.weights.program import LoadedStack, MergeProgram
from inweave.weights.stack import Item, Strength, TensorKey, canonical, fingerprint
from inweave.weights.writer import Writer

Signature = tuple[tuple[int, float], ...]  #: (identity of a placement, strength) of everything a tensor received

_writes: Counter[str] = Counter()  # by component, of all Weavers in this process


def count_writes(keys: Iterable[TensorKey]) -> None:
    """Note that tensors are being written."""
    _writes.update({component for component, _ in keys})


def writes_to(component: str) -> int:
    """Return how often Weavers have begun to write tensors of networks of this name."""
    return _writes[component]


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

    def is_base(self) -> bool:
        """Return whether no tensor differs from the base."""
        return not (self.program or self.signatures or self.uncertain)

    def changed(self) -> Collection[TensorKey]:
        """Return the tensors that differ from the base."""
        known = self.program.tensors.keys() if self.signatures is None and self.program else self.received().keys()
        return known | self.uncertain if self.uncertain else known

    def received(self) -> dict[TensorKey, Signature]:
        """Return what each changed tensor received."""
        if self.signatures is None:
            assert self.program is not None
            placements = [loaded.plan.placements for loaded, _ in self.stack]
            self.signatures = {
                key: tuple((id(p := placements[layer][n]), self.stack[layer][1].at(p, {})) for layer, n in rows)
                for key, rows in self.program.tensors.items()
            }
        return self.signatures

    def during(self, keys: Collection[TensorKey]) -> StackState:
        """Return the same state while ``keys`` are being written."""
        uncertain = self.uncertain | frozenset(keys) if self.uncertain else frozenset(keys)
        return StackState(self.stack, self.signatures, self.program, uncertain)

    def without(self, keys: Iterable[TensorKey]) -> StackState:
        """Return the same state with some tensors at their base."""
        gone = frozenset(keys)
        others = {key: signature for key, signature in self.received().items() if key not in gone}
        return StackState(self.stack if others else (), others, None, self.uncertain - gone)


def signatures_of(items: Mapping[TensorKey, Sequence[Item]]) -> dict[TensorKey, Signature]:
    """Return what every tensor receives, in a form that can be compared."""
    return {key: tuple((id(i.placement), i.strength) for i in received) for key, received in items.items()}


def owners_of(stack: LoadedStack) -> dict[int, LoadedAdapter]:
    """Map the id of each placement to its adapter."""
    return {id(p): loaded for loaded, _ in stack for p in loaded.plan.placements}


def _plan_and_strength(item: tuple[LoadedAdapter, Strength]) -> tuple[Plan, Strength]:
    """Return the pair by which `canonical` orders the items of a stack."""
    return item[0].plan, item[1]


def ordered(stack: LoadedStack) -> LoadedStack:
    """Return a stack in its canonical order."""
    return canonical(stack, _plan_and_strength, _fingerprint)


def _fingerprint(item: tuple[LoadedAdapter, Strength]) -> str:
    """Return the fingerprint of an item of a stack, computed once per adapter."""
    loaded = item[0]
    loaded.fingerprint = loaded.fingerprint or fingerprint(loaded.plan)
    return loaded.fingerprint


def overflow_error(
    keys: Sequence[TensorKey], items: Mapping[TensorKey, Sequence[Item]], stack: LoadedStack, writer: Writer
) -> TargetError:
    """Return the error for tensors whose results their dtype cannot hold."""
    owners, (component, tensor) = owners_of(stack), keys[0]
    causes = dict.fromkeys(
        f"{owners[id(each.placement)].name} at strength {each.strength:g}" for each in items[keys[0]]
    )
    more = f" (and {len(keys) - 1} more tensors)" if len(keys) > 1 else ""
    overflow = overflow_of(writer.live.dtype(keys[0]))
    return TargetError(
        f"{', '.join(causes)}: {component}.{tensor}{more} {overflow}; nothing was changed; use a lower strength"
    )
