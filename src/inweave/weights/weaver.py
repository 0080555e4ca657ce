"""Hot swap: a live model whose weights always equal `MergedSource` of the last stack applied.

    weaver = Weaver(pipeline)                       # a diffusers pipeline, {"unet": unet}, or a bare module
    weaver.apply(["style.safetensors:0.8", (adapter, -0.3)])
    weaver.apply([])                                             # the base, bit for bit

Tensors are looked up in the model for every stack (`live`) and written in place, so compiled graphs and CUDA graphs
stay valid, and only those whose stack changed. The network has no wrapper and no hook, so it runs at the speed of the
base.

    before the first write     an error leaves the old stack
    numbers beyond the dtype   the old stack is put back, bit for bit, and the error names the tensor
    any other failure          the base is put back everywhere, also after an interrupt
    an interrupt elsewhere     the tensors being written are recorded first: `woven` is true, and the next `apply`
                               writes them again

Changes made outside the Weaver between two stacks: moves and conversions (`.to`, `.half`, offloading) are followed. A
weight without adapters may be changed freely: it is the base from then on. One that has adapters merged in and holds
other numbers than were written is refused by name, since its original is lost: call `apply([])` before changing
weights, or make a new Weaver, which takes the present weights as the base.
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
from inweave.errors import InweaveError, MergeStateError, TargetError
from inweave.targets.index import ModelIndex, component_from_names
from inweave.targets.plan import Plan
from inweave.weights.blocks import block_names, refuse_unknown_blocks
from inweave.weights.factors import AdapterCache
from inweave.weights.gc_pause import collector_waits
from inweave.weights.live import LiveModel, write_copies
from inweave.weights.merge import overflow_of
from inweave.weights.networks import networks_of
from inweave.weights.orientation import Orientation
from inweave.weights.pristine import Keep, Pristine, same_bits
from inweave.weights.program import LoadedStack, MergeProgram, cloned, compiled
from inweave.weights.resolved import ResolvedItem
from inweave.weights.source import WeightSource
from inweave.weights.stack import Item, StackEntry, Strength, TensorKey, canonical, items_by_tensor, read_stack
from inweave.weights.stack_state import StackState, owners_of, plan_and_strength, signatures_of
from inweave.weights.writer import Writer, as_memory_error


class _Overflow(Exception):
    """Raised for results that the dtype of their tensors cannot hold; its arguments are the tensors."""


class Weaver:
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
        built_with: Sequence[ResolvedItem] = (),
    ) -> None:
        """Prepare a model for stacks of adapters; nothing is written yet.

        Args:
            networks: A diffusers pipeline, a mapping of component to module, or one module.
            sources: What the networks were built from, so that originals need not be kept.
            keep: Where originals are kept: "auto", "device", "host" or "file" (see `pristine`).
            cache_bytes: The most memory for adapters that were read.
            untie: Give a module its own copy of a shared weight; otherwise an adapter on it is refused.
            built_with: The stack that the networks were built with, by `MergedSource`.

        Raises:
            ConfigError: The networks hold no weights that an adapter could change, or ``keep`` needs sources.
        """
        self._modules = networks_of(networks)
        source_of = sources if isinstance(sources, Mapping) else dict.fromkeys(self._modules, sources)
        pristine = {name: Pristine(keep, source_of.get(name)) for name in self._modules}
        self._live = LiveModel(self._modules)
        self._writer = Writer(self._live, pristine, untie=untie)
        self._cache = AdapterCache(self._resolve, cache_bytes, self._forget)
        self._programs: dict[tuple[object, ...], MergeProgram] = {}
        self._state = StackState()
        self._lock = threading.RLock()
        self._looks = -1
        self._layout: dict[TensorKey, tuple[int, ...]] | None = None
        self._fixed: set[TensorKey] = set()  # changed in shape while building, so they cannot be restored
        self._look()
        if built_with:
            self._take_over(built_with)

    def _look(self) -> None:
        """Find the tensors where they are now, and update everything derived from them."""
        looks = self._live.look()
        if looks == self._looks:
            return
        layout = self._live.layout()
        if layout != self._layout:
            shapes: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in self._modules}
            for (component, tensor), shape in layout.items():
                shapes[component][tensor] = shape
            self.index = ModelIndex({name: component_from_names(name, each) for name, each in shapes.items()})
            self._orientation = Orientation(self._modules, self.index)
            self._blocks = block_names(self.index)
            self._cache.clear()  # plans were made for the old shapes
            self._layout = layout
        tensors: dict[str, list[torch.Tensor]] = {}
        for key, slot in self._live.slots.items():
            tensors.setdefault(key[0], []).append(slot.tensor)
        for name, every in tensors.items():
            self._writer.pristine[name].decide(
                every[0].device, sum(tensor.numel() * tensor.element_size() for tensor in every)
            )
        devices = {tensor.device for every in tensors.values() for tensor in every}
        self._cuda = devices.pop() if len(devices) == 1 and next(iter(devices)).type == "cuda" else None
        self._cache.mapped = self._cuda is not None
        self._inference = any(tensor.is_inference() for every in tensors.values() for tensor in every)
        self._programs = {}
        self._looks = looks

    def _resolve(self, adapter: Adapter, strict: bool = True) -> Plan:
        try:
            plan = self._orientation.resolve(adapter, strict=strict)
        except TargetError as error:
            raise TargetError("\n".join([str(error), *self._live.unwritable()])) from None
        for key in dict.fromkeys((p.component, p.tensor) for p in plan.placements):
            if others := self._live.shared(key):
                plan.report.warnings.append(f"{key[1]}: tied, it shares its memory with {', '.join(others)}")
        return plan

    def _take_over(self, stack: Sequence[ResolvedItem]) -> None:
        """Record the adapters that are merged already; the originals of those tensors are only in the sources."""
        loaded = canonical([(self._cache.put(e.adapter, e.plan), e.strength) for e in stack], plan_and_strength)
        items = self._items(loaded)
        for key, received in items.items():
            self._writer.pristine[key[0]].lies_in_source(key[1])
            if any(item.placement.widen or item.placement.creates for item in received):
                self._fixed.add(key)
        self._writer.mark({key: self._live.home(key) for key in items})
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
    def woven(self) -> bool:
        """Whether any weight differs from the base."""
        return bool(self._state.changed())

    def apply(self, stack: Iterable[StackEntry]) -> int:
        """Make the model's weights those of ``stack``; an empty stack restores the base.

        Args:
            stack: (adapter, strength) pairs or "NAME[:STRENGTH]"; an adapter is a path, an `Adapter` or a `Plan`.

        Returns:
            The number of tensors that were written.

        Raises:
            TargetError: An adapter does not fit, or a result would overflow its dtype; the old stack stays.
            MergeStateError: Weights with adapters merged in were modified outside the Weaver.
            MemoryBudgetError: The device has no memory for this stack; the base was restored.
        """
        entries = read_stack(stack)
        with self._lock, collector_waits():
            # a stack that has a program depends only on its own tensors and on those of the last stack
            repeated = not entries or self._cache.keys(adapter for adapter, _ in entries) in self._programs
            if not repeated or not self._live.are_unchanged(self._writer.marks):
                self._look()
            with self._writing():
                new_stack = [(self._cache.get(adapter), strength) for adapter, strength in entries]
                for loaded, strength in new_stack:
                    refuse_unknown_blocks(strength.blocks, self._blocks, self.index)
                    loaded.check_size()
                    if self._cuda is not None:
                        loaded.upload(self._cuda)
                    loaded.check_finite()
                new_stack = canonical(new_stack, plan_and_strength)
                self._settle()
                written = self._swap(new_stack)
                return written if written is not None else self._apply_changes(new_stack)

    def _writing(self) -> AbstractContextManager[object]:
        """Enter the mode in which the tensors can be written: inference mode if they were made in it."""
        return torch.inference_mode() if self._inference else torch.no_grad()

    def _settle(self) -> None:
        """Follow changes to weights that were written before, or refuse them."""
        if not self._state.uncertain and self._writer.untouched():
            return
        woven, uncertain, marks = self._state.changed(), self._state.uncertain, self._writer.marks
        moved: list[TensorKey] = []
        for key, mark in list(marks.items()):
            if key not in self._live.slots:
                if key in woven:
                    self._live.refuse_remains(key, mark)
                self._drop(key)  # its module is gone, and the weight with it
            elif key in uncertain:
                self._writer.pristine[key[0]].convert(key[1], self._writer.tensor(key))
            elif key in woven:
                if mark != self._live.home(key).mark():
                    moved.append(key)
            elif not self._live.is_at(key, mark):  # without adapters its present numbers are the base
                self._drop(key)
        if moved:
            self._follow(moved)

    def _drop(self, key: TensorKey) -> None:
        """Forget everything about a tensor: its present numbers are the base."""
        self._programs = {}  # they may read the old original
        if key in self._state.changed():
            self._state = self._state.without(key)
        self._writer.pristine[key[0]].forget(key[1])
        self._writer.marks.pop(key, None)

    def _follow(self, moved: Sequence[TensorKey]) -> None:
        """Follow tensors with adapters that were moved: they must hold what was written, or the base."""
        self._programs = {}
        items, owners, foreign = self._items(self._state.stack), owners_of(self._state.stack), list[str]()
        for key in moved:
            home, pristine = self._live.home(key), self._writer.pristine[key[0]]
            (_, _, dtype, device), _ = self._writer.marks[key]
            before = torch.empty(home.tensor.shape, dtype=dtype, device=device)
            if same_bits(self._writer.rebuilt(key, items[key], owners, before).to(home.tensor), home.tensor):
                pristine.convert(key[1], home.tensor)
                self._writer.marks[key] = home.mark()
                if home.tensor.dtype != dtype:  # rounded twice: the next stack writes it again
                    self._state = self._state.during([key])
            elif same_bits(pristine.get(key[1], before).to(home.tensor), home.tensor):
                self._drop(key)
            else:
                foreign.append(key[1])
        if foreign:
            more = f" and {len(foreign) - 1} more tensors" if len(foreign) > 1 else ""
            raise MergeStateError(
                f"{foreign[0]}{more}: modified outside the Weaver while adapters were merged; the original weights are "
                "lost; call apply([]) before changing weights, or make a new Weaver to take the current weights as base"
            )

    def _items(self, stack: LoadedStack, blocks: Mapping[str, str] | None = None) -> dict[TensorKey, list[Item]]:
        pairs = [(loaded.plan, strength) for loaded, strength in stack]
        names = self._blocks if blocks is None else blocks
        return items_by_tensor(pairs, names, lambda p: self._live.canonical((p.component, p.tensor)))

    def _swap(self, stack: LoadedStack) -> int | None:
        """Swap in one launch, the usual case: a stack that shares nothing with the last one, all of it for the
        kernel.
        """
        before = self._state
        keys = tuple(loaded.key for loaded, _ in stack)
        shared = set(keys) & {loaded.key for loaded, _ in before.stack}
        if self._cuda is None or len(set(keys)) != len(keys) or not keys or before.uncertain:
            return None
        if shared and not (len(keys) == 1 == len(before.stack)):
            return None
        if any(s.blocks or 0.0 in (s.overall, *s.components.values()) for _, s in stack):
            return None
        woven = before.changed()
        program = self._programs.get(keys)
        if shared and before.stack[0][1] == stack[0][1]:  # the same stack: only tensors changed outside are written
            return 0 if program is not None and before.program is program else None
        if program is None:
            program = cloned(self._programs.values(), stack, self._cuda) or self._compile(stack)
            if program is None:
                return None
            self._programs[keys] = program
        dropped = [] if before.program is program else [key for key in woven if key not in program.tensors]
        if self._fixed.intersection((*program.tensors, *dropped)):
            return None
        self._writer.check_sources()
        strengths = [strength for _, strength in stack]
        after = StackState(list(stack), None, program)
        self._change([*program.tensors, *dropped], dropped, lambda: program.run(strengths), after)
        return len(program.tensors) + len(dropped)

    def _apply_changes(self, stack: LoadedStack) -> int:
        items = self._items(stack)
        signatures = signatures_of(items)
        received, uncertain = self._state.received(), self._state.uncertain
        changed = [key for key, each in signatures.items() if key in uncertain or received.get(key) != each]
        dropped = [key for key in {**received, **dict.fromkeys(uncertain)} if key not in signatures]
        if stuck := self._fixed.intersection((*changed, *dropped)):
            raise TargetError(
                f"{min(stuck)[1]}: built with an adapter that changes its shape; build the model without it"
            )
        if not changed and not dropped:
            return 0
        self._prepare(changed, items)
        write = partial(self._writer.write, changed, items, owners_of(stack))
        self._change([*changed, *dropped], dropped, write, StackState(list(stack), signatures))
        return len(changed) + len(dropped)

    def _prepare(self, keys: Sequence[TensorKey], items: Mapping[TensorKey, Sequence[Item]]) -> None:
        self._writer.prepare(keys, items, self._state.uncertain)
        self._look()  # untied tensors have new memory

    def _change(
        self,
        keys: Sequence[TensorKey],
        dropped: Sequence[TensorKey],
        write: Callable[[], list[TensorKey]],
        after: StackState,
    ) -> None:
        """Restore ``dropped`` and write the rest of ``keys``, which are marked as uncertain meanwhile."""
        before, writer = self._state, self._writer
        homes = {key: self._live.home(key) for key in keys}
        try:
            self._state = before.during(keys)
            writer.restore(dropped)
            unbounded = write()
            write_copies(homes.values())
            if overflowed := [key for key in unbounded if writer.overflows(key)]:
                raise _Overflow(*overflowed)
            writer.mark(homes)
            self._state = after
            writer.as_built.difference_update(keys)
        except _Overflow as overflow:
            self._undo(keys, before)
            raise TargetError(self._overflow_message(overflow.args, after.stack)) from None
        except BaseException as error:
            self._abandon({*keys, *before.changed()})
            raise as_memory_error(error) from None

    def _undo(self, keys: Sequence[TensorKey], before: StackState) -> None:
        """Put the stack before back, bit for bit: its tensors are computed again from their originals."""
        try:
            items, owners = self._items(before.stack), owners_of(before.stack)
            homes = {key: self._live.home(key) for key in keys}
            woven = [key for key in keys if key in before.received() and key not in before.uncertain]
            self._writer.restore([key for key in keys if key not in woven])
            for key in woven:
                home = homes[key].tensor
                home.copy_(self._writer.rebuilt(key, items[key], owners, torch.empty_like(home)))
            write_copies(homes.values())
            self._writer.mark(homes)
            self._state = before
        except BaseException as error:
            self._abandon({*keys, *before.changed()})
            raise as_memory_error(error) from None

    def _abandon(self, keys: Collection[TensorKey]) -> None:
        """Restore the base everywhere after a failure, with nothing woven."""
        self._state = StackState((), {}, None, frozenset(keys))
        try:
            homes = {key: self._live.home(key) for key in keys}
            self._writer.restore(keys)
            write_copies(homes.values())
            self._writer.mark(homes)
        except Exception as error:
            raise InweaveError(f"the base could not be restored; build the model again: {error}") from error
        self._state = StackState()

    def _overflow_message(self, keys: Sequence[TensorKey], stack: LoadedStack) -> str:
        owners, (component, tensor) = owners_of(stack), keys[0]
        items = self._items(stack)[keys[0]]
        causes = dict.fromkeys(f"{owners[id(each.placement)].name} at strength {each.strength:g}" for each in items)
        more = f" (and {len(keys) - 1} more tensors)" if len(keys) > 1 else ""
        overflow = overflow_of(self._writer.tensor(keys[0]).dtype)
        return f"{', '.join(causes)}: {component}.{tensor}{more} {overflow}; nothing was changed; use a lower strength"

    def _compile(self, stack: LoadedStack) -> MergeProgram | None:
        """Return a program for these adapters, if the kernel can take every tensor of them."""
        full = Strength()
        items = self._items([(loaded, full) for loaded, _ in stack], {})
        self._prepare(list(items), items)
        return compiled(self._writer, [loaded for loaded, _ in stack], items)

    def _forget(self, key: object) -> None:
        """Drop the programs of an adapter that left the cache: they hold its factors."""
        for keys in [keys for keys in self._programs if key in keys]:
            del self._programs[keys]
