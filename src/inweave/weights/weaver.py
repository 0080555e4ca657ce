"""Hot swap: a live model whose weights always equal `MergedSource` of the last stack applied.

    weaver = Weaver(pipeline)                       # a diffusers pipeline, {"unet": unet}, or a bare module
    weaver.apply(["style.safetensors:0.8", (adapter, -0.3)])
    weaver.apply([])                                             # the base, bit for bit

Tensors are looked up in the model for every stack (`live`) and written in place, so compiled graphs and CUDA graphs
stay valid, and only those whose stack changed. Without wrappers and hooks, it runs at the speed of the base.

    before the first write     an error leaves the old stack
    numbers beyond the dtype   the old stack is put back, bit for bit, and the error names the tensor
    quantized layers           dequantized, changed and quantized again (`quantized`); `rounding_loss` is what that
                               costs, `side_products` names those that keep their bits instead
    any other failure          the base is put back everywhere, also after an interrupt
    an interrupt elsewhere     the tensors being written are recorded first: `woven` is true, and the next `apply`
                               writes them again

Between two stacks, moves and conversions (`.to`, `.half`, offloading) are followed, and weights without adapters may be
changed freely. Weights with adapters that hold other numbers than were written are refused by name (`outside`): call
`apply([])` before changing them, or `restore()` afterwards. Weavers that share a module know of each other (`claims`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from inweave.adapter import Adapter
from inweave.errors import InweaveError, TargetError
from inweave.targets.index import ModelIndex
from inweave.targets.plan import Plan
from inweave.weights.blocks import refuse_unknown_blocks
from inweave.weights.claims import Claim
from inweave.weights.described import Described
from inweave.weights.factors import AdapterCache
from inweave.weights.gc_pause import collector_waits
from inweave.weights.live import LiveModel, write_copies
from inweave.weights.live_index import LiveIndex, cuda_device, tensors_by_component
from inweave.weights.networks import networks_of
from inweave.weights.outside import follow, refuse_foreign, restorable
from inweave.weights.pristine import Keep, Pristine
from inweave.weights.program import LoadedStack, MergeProgram, cloned, compiled
from inweave.weights.resolved import ResolvedItem
from inweave.weights.source import WeightSource
from inweave.weights.stack import Item, StackEntry, Strength, TensorKey, items_by_tensor, read_stack
from inweave.weights.stack_state import StackState, count_writes, ordered, overflow_error, owners_of, signatures_of
from inweave.weights.writer import Targets, Writer, as_memory_error

Write = Callable[[], Callable[[], list[TensorKey]]]


class _Overflow(Exception):
    """Raised for results that the dtype of their tensors cannot hold; its arguments are the tensors."""


class Weaver(Described):
    """Merges stacks of adapters into the weights of a live model, in place, and swaps them in milliseconds.

    The model keeps its modules and its speed; `apply([])` restores the base bit for bit. Safe to use from several
    threads.

        weaver = inweave.Weaver(pipeline)
        weaver.apply([("style.safetensors", 0.8), ("detail.safetensors", {"unet": 1.0, "te": 0.5})])
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module] | nn.Module | object,
        *,
        sources: Mapping[str, WeightSource] | WeightSource | None = None,
        keep: Keep = "auto",
        cache_bytes: int = 4 * 1024**3,
        untie: bool = False,
        max_loss: float | None = None,
        built_with: Sequence[ResolvedItem] = (),
    ) -> None:
        """Prepare a model for stacks of adapters; nothing is written yet.

        Args:
            networks: A diffusers pipeline, a mapping of component to module, or one module.
            sources: What the networks were built from, so that originals need not be kept.
            keep: Where originals are kept: "auto", "device", "host" or "file" (see `pristine`).
            cache_bytes: The most memory for adapters that were read.
            untie: Give a module its own copy of a shared weight; otherwise an adapter on it is refused.
            max_loss: The most that `rounding_loss` of a quantized weight may be; LoRAs on others are `side_products`.
            built_with: The stack that the networks were built with, by `MergedSource`.

        Raises:
            ConfigError: The networks hold no weights that an adapter could change, or ``keep`` needs sources.
        """
        self._modules = networks_of(networks)
        source_of = sources if isinstance(sources, Mapping) else dict.fromkeys(self._modules, sources)
        pristine = {name: Pristine(keep, source_of.get(name)) for name in self._modules}
        self._live = LiveModel(self._modules)
        self._writer = Writer(self._live, pristine, untie=untie, max_loss=max_loss)
        self._lock = threading.RLock()
        self._claim = Claim(self, self._lock)
        self._cache = AdapterCache(self._resolve, cache_bytes, self._forget)
        self.holds = self._cache.holds  # whether an adapter is in memory, so that applying it reads no file
        self._programs: dict[tuple[object, ...], MergeProgram] = {}
        self._targets: dict[int, Targets] = {}
        self._looks = -1
        self._known = LiveIndex(self._modules, self._live)
        self._fixed: set[TensorKey] = set()  # changed in shape while building, so they cannot be restored
        self._look()
        if built_with:
            self._take_over(built_with)

    def _look(self) -> None:
        """Find the tensors where they are now, and update everything derived from them."""
        looks = self._live.look()
        if looks == self._looks:
            return
        if self._live.layout() != self._known.layout:
            self._known = LiveIndex(self._modules, self._live)
            self._cache.clear()  # plans were made for the old shapes
        self._claim.enter(self._live)
        tensors = tensors_by_component(self._live)
        for name, every in tensors.items():
            self._writer.pristine[name].decide(every[0].device, sum(t.numel() * t.element_size() for t in every))
        self._cuda = cuda_device(tensors)
        self._cache.mapped = self._cuda is not None
        self._inference = any(tensor.is_inference() for every in tensors.values() for tensor in every)
        self._forget_programs()
        self._looks = looks

    @property
    def index(self) -> ModelIndex:
        """The names and shapes of the model's tensors, on which adapters are placed."""
        return self._known.index

    def _resolve(self, adapter: Adapter, strict: bool = True) -> Plan:
        return self._known.resolve(adapter, strict=strict)

    def _take_over(self, stack: Sequence[ResolvedItem]) -> None:
        """Record the adapters that are merged already; the originals of those tensors are only in the sources."""
        loaded = ordered([(self._cache.put(e.adapter, e.plan), e.strength) for e in stack])
        items = self._items(loaded)
        self._live.refuse_quantized(self._live.layers.keys() & items)
        for key, received in items.items():
            self._writer.pristine[key[0]].lies_in_source(key[1])
            if any(item.placement.widen or item.placement.creates for item in received):
                self._fixed.add(key)
        self._writer.marks.record({key: self._live.home(key) for key in items})
        self._writer.as_built = set(items)
        self._state = StackState(loaded, signatures_of(items))

    def plan(self, adapter: Adapter | str | os.PathLike[str], *, strict: bool = True) -> Plan:
        """Return where every tensor of an adapter goes; cached.

        Args:
            adapter: An `Adapter` or the path of one.
            strict: Raise if a tensor has no place; otherwise plan the rest.

        Raises:
            TargetError: A tensor has no place, and ``strict`` is set.
        """
        with self._lock:
            self._look()
            return self._cache.get(adapter).plan if strict else self._cache.partial_plan(adapter)

    @property
    def _state(self) -> StackState:
        """The state of the weights: in the claim, which the modules hold."""
        return self._claim.state

    @_state.setter
    def _state(self, state: StackState) -> None:
        count_writes(state.uncertain)
        self._claim.hold(state, self._writer.pristine, self._writer.marks)

    @property
    def woven(self) -> bool:
        """Whether any weight differs from the base."""
        return self._claim.woven

    def apply(self, stack: Iterable[StackEntry]) -> int:
        """Make the model's weights those of ``stack``; an empty stack restores the base.

        Args:
            stack: (adapter, strength) pairs or "NAME[:STRENGTH]"; an adapter is a path, an `Adapter` or a `Plan`.

        Returns:
            The number of tensors that were written.

        Raises:
            TargetError: An adapter does not fit, or a result would overflow its dtype; the old stack stays.
            MergeStateError: Weights with adapters merged in were modified outside the Weaver, or another Weaver has
                adapters merged into the same modules.
            MemoryBudgetError: The device has no memory for this stack; the base was restored.
        """
        entries = read_stack(stack)
        with self._lock, collector_waits():
            # a stack that has a program depends only on its own tensors and on those of the last stack
            keys = self._cache.keys(adapter for adapter, _ in entries)
            repeated = not keys or keys in self._programs
            known = repeated and self._claim.is_alone()
            if not known or not self._live.are_unchanged(self._writer.marks.keys()):
                self._look()
            with self._writing(), self._claim.turn(self._live):
                loaded_stack = []
                for key, (adapter, strength) in zip(keys, entries, strict=True):
                    loaded = self._cache.get(adapter, key)
                    refuse_unknown_blocks(strength.blocks, self._known.blocks, self.index)
                    loaded.check_size()
                    if self._cuda is not None:
                        loaded.upload(self._cuda)
                    loaded.check_finite()
                    loaded_stack.append((loaded, strength))
                new_stack = ordered(loaded_stack)
                self._settle()
                if not new_stack:
                    return self._unweave()
                written = self._swap(new_stack)
                return written if written is not None else self._apply_changes(new_stack)

    def _writing(self) -> AbstractContextManager[object]:
        """Enter the mode in which the tensors can be written: inference mode if they were made in it."""
        return torch.inference_mode() if self._inference else torch.no_grad()

    def restore(self) -> int:
        """Write the originals back, also where `apply` refuses since weights were modified: the modification is lost.

        Returns:
            The number of tensors that were written.

        Raises:
            MergeStateError: A module was wrapped or quantized meanwhile, or another Weaver has adapters merged into it.
        """
        with self._lock, collector_waits():
            self._look()
            with self._writing(), self._claim.turn(self._live, force=True):
                self._forget_programs()
                present = restorable(self._live, self._writer, self._state)
                self._refuse_fixed(present)
                self._abandon(present)
                return len(present)

    def _settle(self) -> None:
        """Follow changes to weights that were written before, or refuse them."""
        if not self._state.uncertain and self._writer.marks.untouched():
            return
        change = follow(self._live, self._writer, self._state, lambda: self._items(self._state.stack))
        self._state = change.state
        if change.moved:
            self._forget_programs()  # they may read the old originals
        refuse_foreign(change.foreign)

    def _refuse_fixed(self, keys: Iterable[TensorKey]) -> None:
        if stuck := self._fixed.intersection(keys):
            name = min(stuck)[1]
            raise TargetError(f"{name}: built with an adapter that changes its shape; build the model without it")

    def _items(self, stack: LoadedStack, blocks: Mapping[str, str] | None = None) -> dict[TensorKey, list[Item]]:
        pairs = [(loaded.plan, strength) for loaded, strength in stack]
        names = self._known.blocks if blocks is None else blocks
        return items_by_tensor(pairs, names, lambda p: self._live.canonical((p.component, p.tensor)))

    def _swap(self, stack: LoadedStack) -> int | None:
        """Swap in one launch, if the stack shares nothing with the last one and the kernel takes all of it."""
        before = self._state
        keys = tuple(loaded.key for loaded, _ in stack)
        shared = set(keys) & {loaded.key for loaded, _ in before.stack}
        if self._cuda is None or len(set(keys)) != len(keys) or before.uncertain:
            return None
        in_part = any(s.blocks or 0.0 in (s.overall, *s.components.values()) for _, s in stack)
        if in_part or (shared and not (len(keys) == 1 == len(before.stack))):
            return None
        program = self._programs.get(keys)
        if shared and before.stack[0][1] == stack[0][1]:  # the same stack: only tensors changed outside are written
            return 0 if program is not None and before.program is program else None
        if program is None:
            program = cloned(self._programs.values(), stack, self._cuda) or self._compile(stack)
            if program is None:
                return None
            self._programs[keys] = program
        own = before.program is not None and before.program.tensors is program.tensors
        dropped = [] if own else [key for key in before.changed() if key not in program.tensors]
        if self._fixed and self._fixed.intersection((*program.tensors, *dropped)):
            return None
        self._writer.check_sources()
        targets = self._targets_of(program).joined(dropped, self._live)
        start = partial(program.start, [strength for _, strength in stack])
        self._change(targets, dropped, start, StackState(list(stack), None, program))
        return len(program.tensors) + len(dropped)

    def _targets_of(self, program: MergeProgram) -> Targets:
        """Return the tensors that a program writes; the same for all programs of a layout."""
        known = self._targets.get(id(program.tensors))
        if known is None:
            known = self._targets[id(program.tensors)] = Targets(program.tensors, self._live)
        return known

    def _unweave(self) -> int:
        """Restore the base."""
        before = self._state
        dropped = list(before.changed())
        if not dropped:
            return 0
        self._refuse_fixed(dropped)
        self._writer.check_sources()
        known = before.program is not None and before.signatures is None and not before.uncertain
        targets = self._targets_of(before.program) if known and before.program else Targets(dropped, self._live)
        self._change(targets, targets.homes, lambda: list, StackState())
        return len(dropped)

    def _apply_changes(self, stack: LoadedStack) -> int:
        items = self._items(stack)
        signatures = signatures_of(items)
        received, uncertain = self._state.received(), self._state.uncertain
        changed = [key for key, each in signatures.items() if key in uncertain or received.get(key) != each]
        dropped = [key for key in {**received, **dict.fromkeys(uncertain)} if key not in signatures]
        self._refuse_fixed((*changed, *dropped))
        if not changed and not dropped:
            return 0
        self._prepare(changed, items)
        targets = Targets([*changed, *dropped], self._live)
        write = partial(self._writer.write, changed, items, owners_of(stack))
        self._change(targets, dropped, lambda: partial(list, write()), StackState(list(stack), signatures))
        return len(changed) + len(dropped)

    def _prepare(self, keys: Sequence[TensorKey], items: Mapping[TensorKey, Sequence[Item]]) -> None:
        self._writer.prepare(keys, items, self._state.uncertain)
        self._look()  # untied tensors have new memory

    def _change(self, targets: Targets, dropped: Collection[TensorKey], write: Write, after: StackState) -> None:
        """Restore ``dropped`` and write the other targets, which are marked as uncertain meanwhile.

        ``write`` begins; what it returns waits for the end, and returns the tensors with numbers beyond the limit.
        """
        before, writer, keys = self._state, self._writer, targets.keys
        try:
            self._state = before.during(keys)
            if dropped:
                writer.restore(targets, dropped)
            finish = write()
            write_copies(targets.copied)
            writer.marks.record(targets.homes)
            if overflowed := [key for key in finish() if writer.overflows(key)]:
                raise _Overflow(*overflowed)
            self._state = after
            if writer.as_built:
                writer.as_built.difference_update(keys)
        except _Overflow as overflow:
            self._undo(keys, before)
            raise overflow_error(overflow.args, self._items(after.stack), after.stack, self._writer) from None
        except BaseException as error:
            self._abandon({*keys, *before.changed()})
            raise as_memory_error(error) from None

    def _undo(self, keys: Collection[TensorKey], before: StackState) -> None:
        """Put the stack before back, bit for bit: its tensors are computed again from their originals."""
        try:
            items, owners = self._items(before.stack), owners_of(before.stack)
            homes = {key: self._live.home(key) for key in keys}
            woven = [key for key in keys if key in before.received() and key not in before.uncertain]
            self._writer.restore_all([key for key in keys if key not in woven])
            for key in woven:
                home = homes[key].tensor
                home.copy_(self._writer.rebuilt(key, items[key], owners, torch.empty_like(home)))
            write_copies(homes.values())
            self._writer.marks.record(homes)
            self._state = before
        except BaseException as error:
            self._abandon({*keys, *before.changed()})
            raise as_memory_error(error) from None

    def _abandon(self, keys: Collection[TensorKey]) -> None:
        """Restore the base everywhere after a failure, with nothing woven."""
        self._state = StackState((), {}, None, frozenset(keys))
        try:
            homes = {key: self._live.home(key) for key in keys}
            self._writer.restore_all(keys)
            write_copies(homes.values())
            self._writer.marks.record(homes)
        except Exception as error:
            raise InweaveError(f"the base could not be restored; build the model again: {error}") from error
        self._state = StackState()

    def _compile(self, stack: LoadedStack) -> MergeProgram | None:
        """Return a program for these adapters, if the kernel can take every tensor of them."""
        full = Strength()
        items = self._items([(loaded, full) for loaded, _ in stack], {})
        self._prepare(list(items), items)
        return compiled(self._writer, [loaded for loaded, _ in stack], items)

    def _forget_programs(self) -> None:
        self._programs, self._targets = {}, {}

    def _forget(self, key: object) -> None:
        """Drop the programs of an adapter that left the cache: they hold its factors."""
        for keys in [keys for keys in self._programs if key in keys]:
            del self._programs[keys]
