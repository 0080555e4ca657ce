"""Claims on modules: two Weavers that share a module would both merge into its weights.

Also those of two modules that share a parameter, or its memory.

    claim      one per Weaver: the state of its weights and the originals it holds; it refers to no module
    claims     those on one module, kept in its `__dict__`, and those on one tensor: they end with what they are on
    shared     the same place (module, attribute), or two places whose tensors are the same memory
    turn       one Weaver at a time writes to the weights that it shares with others

    another Weaver has adapters merged in       refused by name
    it was deleted meanwhile                    its originals are written back first
    overlapping memory of another layout        refused by name: a view, a slice or a transpose
    a copy of a module with adapters            refused by name, since its originals were not copied

A claim with adapters merged in outlives its Weaver, or the next one would take these weights for the base.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from inweave.errors import MergeStateError
from inweave.ops.tensors.overlaps import address, overlaps
from inweave.weights.beside import take_away
from inweave.weights.live import Home, LiveModel
from inweave.weights.marks import Marks
from inweave.weights.pristine import Pristine
from inweave.weights.stack import TensorKey
from inweave.weights.stack_state import StackState

_ATTRIBUTE = "_inweave_claims"
_lock = threading.RLock()  # entered itself: an interrupt inside of `Condition.__enter__` would leave it locked
_turn = threading.Condition(_lock)
_woven: weakref.WeakSet[Claim] = weakref.WeakSet()  # with adapters merged in: the others cost a swap nothing
_writers: weakref.WeakSet[Claim] = weakref.WeakSet()
_on_tensors: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> the claims on it
_next_collection = 0.0


class Claim:
    """What a Weaver did to the modules that carry this claim."""

    def __init__(self, owner: object, lock: threading.RLock) -> None:
        self.owner, self._lock = weakref.ref(owner, self._release_tensors), lock
        self.state = StackState()
        self._originals: tuple[Mapping[str, Pristine], Marks] | None = None
        self.homes: Mapping[Home, TensorKey] = {}  # the names of the places, in its own model
        self.tensors: dict[TensorKey, weakref.ref[torch.Tensor]] = {}
        self.memory: frozenset[int] = frozenset()  # identities and addresses that may be those of another's tensors
        self.writing = False
        self._copied = ""  # a module that was copied with adapters merged in

    def enter(self, live: LiveModel) -> None:
        """Leave the claim on every module with weights, and on every weight."""
        self.homes, self._copied = live.first, ""
        modules = {id(slot.module): (slot.module, key) for key, slot in live.slots.items()}
        tensors = {key: live.visible(key) for key in live.first.values()}
        self.tensors = {key: weakref.ref(tensor) for key, tensor in tensors.items()}
        self.memory = frozenset(place for tensor in tensors.values() for place in _places(tensor))
        with _lock:
            for module, key in modules.values():
                claims = module.__dict__.get(_ATTRIBUTE)
                if claims is True:
                    self._copied = self._copied or key[1]
                elif isinstance(claims, Claims):
                    if self not in claims:
                        claims[:] = [claim for claim in claims if claim.owner() or claim.woven] + [self]
                else:
                    module.__dict__[_ATTRIBUTE] = Claims(module, [self])
            for tensor in tensors.values():
                claims = _on_tensors.get(tensor, ())  # type: ignore[no-untyped-call]
                if self not in claims:
                    _on_tensors[tensor] = [claim for claim in claims if claim.owner() or claim.woven] + [self]

    def _release_tensors(self, owner: object) -> None:
        """Refer to no live tensor once the Weaver is deleted, or the claims on tensors would keep them alive."""
        if self._originals is not None:
            self._originals[1].release()
            self.state = StackState((), dict.fromkeys(self.state.changed(), ()))

    @property
    def woven(self) -> bool:
        """Whether adapters are merged in."""
        return not self.state.is_base()

    def is_alone(self) -> bool:
        """Return whether no other Weaver has adapters merged in, in any model."""
        with _lock:
            return not any(claim is not self for claim in _woven)

    def hold(self, state: StackState, pristine: Mapping[str, Pristine], marks: Marks) -> None:
        """Set the state of the weights, and hold the originals while they differ from the base."""
        with _lock:  # wherever an interrupt comes, no claim with adapters merged in is missing from the set
            _woven.add(self)
            self.state, self._originals = state, None if state.is_base() else (pristine, marks)
            if state.is_base():
                _woven.discard(self)

    def merged_into(self, module: nn.Module) -> Iterator[TensorKey]:
        """Yield the tensors of a module that have adapters merged in."""
        changed = self.state.changed()
        for leaf in (*module._parameters, *module._buffers):
            key = self.homes.get((id(module), leaf))
            if key is not None and key in changed:
                yield key

    @contextmanager
    def turn(self, live: LiveModel, *, force: bool = False) -> Iterator[None]:
        """Hold the modules of ``live`` while they are written; weights of deleted Weavers are restored first.

        ``force``: restore them even if they were modified since.

        Raises:
            MergeStateError: Another Weaver has adapters merged into one of them, or they are copies of such modules.
        """
        with _lock:
            while any(claim._writes() and self._shared(claim, live) for claim in _writers if claim is not self):
                _turn.wait(0.1)
            if self._copied:
                raise MergeStateError(
                    f"{self._copied}: this model was copied while adapters were merged into it, so its original "
                    "weights are not known; copy it after apply([]), or load its state dict into a new module to take "
                    "its weights as the base"
                )
            others = [claim for claim in _woven if claim is not self]
            self.writing = True
            _writers.add(self)
        try:
            for claim in others:
                if shared := self._shared(claim, live):
                    self._settle(claim, live, shared, force)
            yield
        finally:
            with _lock:
                self.writing = False
                _writers.discard(self)
                _turn.notify_all()

    def _shared(self, other: Claim, live: LiveModel) -> dict[TensorKey, TensorKey]:
        """Return the tensors of ``live`` that another Weaver can write too: their names here and there.

        Raises:
            MergeStateError: It has adapters merged into memory that a tensor of ``live`` overlaps in another layout.
        """
        shared: dict[TensorKey, TensorKey] = {}
        if not other.homes.keys().isdisjoint(live.first):
            for home, mine in live.first.items():
                theirs = other.homes.get(home)
                if theirs is not None:
                    claims = live.slots[mine].module.__dict__.get(_ATTRIBUTE)
                    if isinstance(claims, Claims) and other in claims:
                        shared[mine] = theirs
        if not other.memory.isdisjoint(self.memory):
            self._add_same_memory(shared, other)
        return shared

    def _add_same_memory(self, shared: dict[TensorKey, TensorKey], other: Claim) -> None:
        """Add the tensors that are the memory of another's tensors, at other places."""
        by_place: dict[int, list[tuple[TensorKey, torch.Tensor]]] = {}
        for mine, reference in self.tensors.items():
            if mine not in shared and (tensor := reference()) is not None:
                for place in _places(tensor):
                    by_place.setdefault(place, []).append((mine, tensor))
        for theirs in other.state.changed():
            if (known := other.tensors.get(theirs)) is None or (tensor := known()) is None:
                continue
            for mine, own in (pair for place in _places(tensor) for pair in by_place.get(place, ())):
                if own is tensor or _layout(own) == _layout(tensor):
                    shared[mine] = theirs
                elif overlaps({0: own, 1: tensor}):
                    raise MergeStateError(
                        f"{mine[1]}: it shares its memory with {theirs[1]} of another Weaver, which has adapters "
                        "merged into it; call apply([]) on that first, or give one of them memory of its own"
                    )

    def _writes(self) -> bool:
        """Return whether a thread is writing; after an interrupt that left the mark, none holds the lock."""
        if self.writing and self._lock.acquire(blocking=False):
            self.writing = False
            self._lock.release()
        return self.writing

    def _settle(self, other: Claim, live: LiveModel, shared: Mapping[TensorKey, TensorKey], force: bool) -> None:
        """Restore what a deleted Weaver left; refuse what a living one has."""
        own, changed = self.state.changed(), other.state.changed()
        # what both have merged in was shared later: each restores its own
        woven = {mine: theirs for mine, theirs in shared.items() if theirs in changed and mine not in own}
        if not woven:
            return
        if other.owner() is not None:
            _collect()  # in a cycle, perhaps
        if other.owner() is not None:
            name, theirs = next((mine[1], theirs[1]) for mine, theirs in woven.items())
            alias = "" if name == theirs else f", as its {theirs}"
            raise MergeStateError(
                f"{name}: another Weaver has adapters merged into this module or parameter{alias}; call apply([]) on "
                "it first, or use one Weaver for all models that share it"
            )
        assert other._originals is not None
        (originals, marks), homes = other._originals, {mine: live.home(mine) for mine in woven}
        lost = [mine for mine, home in homes.items() if marks.get(woven[mine]) != home.mark()]
        if lost and not force:
            raise MergeStateError(
                f"{lost[0][1]}: modified after a Weaver that had adapters merged into it was deleted; restore() puts "
                "the original weights back, and the modification is lost"
            )
        for mine, (component, name) in woven.items():
            tensor = homes[mine].tensor
            original = originals[component].get(name, tensor)
            if original.shape != tensor.shape:
                raise MergeStateError(f"{mine[1]}: its original is {list(original.shape)}; build the model again")
            tensor.copy_(original)
            if mine in live.layers:
                take_away(live.layers[mine])
            for copy in homes[mine].copies:
                copy.copy_(tensor)
        other.hold(other.state.without(woven.values()), originals, marks)


class Claims(list[Claim]):
    """The claims on one module. Copied or pickled with it, they become True if adapters were merged in."""

    def __init__(self, module: nn.Module, claims: Iterable[Claim]) -> None:
        super().__init__(claims)
        self._module = weakref.ref(module)

    def __reduce_ex__(self, protocol: object) -> tuple[type[bool], tuple[bool]]:
        module = self._module()
        return bool, (module is None or any(True for claim in self for _ in claim.merged_into(module)),)


def _places(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return numbers of which two tensors with common memory share one, unless one of them was moved meanwhile."""
    return (id(tensor), tensor.untyped_storage().data_ptr()) if address(tensor) else (id(tensor),)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return address(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _collect() -> None:
    """Collect garbage, for half of the time at most: Weavers that take turns would do nothing else."""
    global _next_collection
    if (start := time.monotonic()) >= _next_collection:
        gc.collect()
        _next_collection = 2 * time.monotonic() - start
