"""Hot swap: a live model whose weights always equal `MergedSource` of the last stack applied.

    weaver = Weaver(pipeline)                       # of diffusers; or {"unet": unet}, or a bare module
    weaver.apply(["style.safetensors:0.8", (adapter, -0.3)])
    weaver.apply([])                                             # the base, bit for bit

Tensors are written in place, so compiled graphs and CUDA graphs stay valid, and only those whose stack
changed. An error before the first write leaves the old stack; one after it restores the base everywhere.
The network never learns of adapters: no wrapper, no hook, base speed exactly.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from inweave.adapter import Adapter
from inweave.errors import InweaveError, MemoryBudgetError, TargetError
from inweave.ops.merge import Target, merge_products
from inweave.ops.merge.dispatch import Launch, prepared
from inweave.targets.plan import Placement, Plan
from inweave.weights.factors import AdapterCache, Loaded, targets_of
from inweave.weights.gc_pause import collector_waits
from inweave.weights.merge import is_product, merge_into
from inweave.weights.networks import floating_state, index_of, networks_of
from inweave.weights.orientation import Orientation
from inweave.weights.pristine import Keep, Pristine
from inweave.weights.resolved import ResolvedLayer
from inweave.weights.scratch import Scratch
from inweave.weights.source import WeightSource
from inweave.weights.stack import AdapterLike, Item, StackEntry, Strength, block_names, items_by_tensor, read_stack

TensorKey = tuple[str, str]  # component, tensor name
Layer = tuple[AdapterLike, float | Mapping[str, float] | Strength]


@dataclass(slots=True)
class _Network:
    tensors: dict[str, torch.Tensor]
    pristine: Pristine


class Weaver:
    """Merges stacks of adapters into the weights of a live model, in place, and swaps them in milliseconds.

    The model keeps its modules and its speed; `apply([])` restores the base bit for bit. Safe to use from several threads.

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
        built_with: Sequence[ResolvedLayer] = (),
    ) -> None:
        """``networks``: a diffusers pipeline as it is, a mapping of component to module, or one module.

        ``sources``: what the networks were built from, so that originals need not be kept. ``keep``: where originals
        go (see `pristine`). ``cache_bytes``: how much of read adapters to hold. ``built_with``: the stack that the
        networks were built with, by `MergedSource`; sources are the base's own.
        """
        modules = networks_of(networks)
        source_of = sources if isinstance(sources, Mapping) else dict.fromkeys(modules, sources)
        self._networks: dict[str, _Network] = {}
        for name, module in modules.items():
            tensors = floating_state(module)
            pristine = Pristine(keep, source_of.get(name))
            pristine.decide(next(iter(tensors.values())).device, sum(value.nbytes for value in tensors.values()))
            self._networks[name] = _Network({k: v.data for k, v in tensors.items()}, pristine)
        self.index = index_of(modules)
        self._orientation = Orientation(modules, self.index)
        self._blocks = block_names(self.index)
        self._cache = AdapterCache(self._orientation.resolve, cache_bytes, self._forget)
        self._signatures: dict[TensorKey, tuple[tuple[int, float], ...]] | None = {}
        self._running: tuple[Program, list[Strength]] | None = None
        self._layers: list[tuple[Loaded, Strength]] = []  # held, so that the identities in use stay unique
        self._programs: dict[tuple[object, ...], Program] = {}
        self._lock = threading.RLock()
        devices = {value.device for network in self._networks.values() for value in network.tensors.values()}
        self._cuda = devices.pop() if len(devices) == 1 and next(iter(devices)).type == "cuda" else None
        self._fixed: set[TensorKey] = set()  # changed in shape while building, so they cannot go back
        if built_with:
            self._take_over(built_with)

    def _take_over(self, stack: Sequence[ResolvedLayer]) -> None:
        """Record what is merged already; the originals of those tensors are in the sources only."""
        self._layers = [(self._cache.put(each.adapter, each.plan), each.strength) for each in stack]
        items = items_by_tensor([(loaded.plan, strength) for loaded, strength in self._layers], self._blocks)
        self._signatures = {
            key: tuple((id(i.placement), i.strength) for i in received) for key, received in items.items()
        }
        for key, received in items.items():
            self._networks[key[0]].pristine.lies_in_source(key[1])
            if any(item.placement.widen or item.placement.creates for item in received):
                self._fixed.add(key)

    def plan(self, adapter: Adapter | str | os.PathLike[str]) -> Plan:
        """Where every tensor of an adapter goes in these networks; cached for when it is applied."""
        with self._lock:
            return self._cache.get(adapter).plan

    @property
    def woven(self) -> bool:
        """Whether any weight differs from the base."""
        return bool(self._changed_keys())

    def _changed_keys(self) -> Collection[TensorKey]:
        """The tensors that differ from the base."""
        if self._signatures is None and self._running is not None:
            return self._running[0].tensors.keys()
        return (self._signatures or {}).keys()

    @property
    def _woven(self) -> dict[TensorKey, tuple[tuple[int, float], ...]]:
        """What each of them received; computed only if a later stack shares something with this one."""
        if self._signatures is None and self._running is not None:
            program, strengths = self._running
            self._signatures = {
                key: tuple((number, strengths[layer].at(p, {})) for number, layer, p in rows)
                for key, rows in program.tensors.items()
            }
        return self._signatures or {}

    def apply(self, stack: Iterable[StackEntry]) -> int:
        """Make the model's weights those of ``stack``; returns how many tensors were written.

        Entries are (adapter, strength) pairs or "NAME[:STRENGTH]"; adapters may be paths, `Adapter`s or `Plan`s. An empty
        stack restores the base.
        """
        with self._lock, torch.no_grad(), collector_waits():
            layers = [(self._cache.get(adapter), strength) for adapter, strength in read_stack(stack)]
            for loaded, _ in layers:
                if self._cuda is not None:
                    loaded.upload(self._cuda)
                loaded.check_finite()
            written = self._swap(layers)
            return written if written is not None else self._apply_changes(layers)

    def _swap(self, layers: Sequence[tuple[Loaded, Strength]]) -> int | None:
        """The usual case in one launch: a stack that shares nothing with the one before, all of it for the kernel."""
        keys = tuple(loaded.key for loaded, _ in layers)
        shared = set(keys) & {loaded.key for loaded, _ in self._layers}
        if self._cuda is None or len(set(keys)) != len(keys) or not keys:
            return None
        if shared and not (len(keys) == 1 == len(self._layers)):
            return None
        if any(s.blocks or 0.0 in (s.overall, *s.components.values()) for _, s in layers):
            return None
        if shared and self._layers[0][1] == layers[0][1]:
            return 0
        program = self._programs.get(keys)
        if program is None:
            program = self._clone(layers) or self._compile(layers)
            if program is None:
                return None
            self._programs[keys] = program
        woven = self._changed_keys()
        dropped = [] if woven is program.tensors.keys() else [key for key in woven if key not in program.tensors]
        for network in self._networks.values():
            network.pristine.check()
        try:
            self._restore(dropped)
            program.run([strength for _, strength in layers])
        except BaseException as error:
            self._abandon({*program.tensors, *woven})
            raise _ours(error) from None
        self._running = program, [strength for _, strength in layers]
        self._signatures = None
        self._layers = list(layers)
        return len(program.tensors) + len(dropped)

    def _apply_changes(self, layers: Sequence[tuple[Loaded, Strength]]) -> int:
        items = items_by_tensor([(loaded.plan, strength) for loaded, strength in layers], self._blocks)
        signatures = {key: tuple((id(i.placement), i.strength) for i in received) for key, received in items.items()}
        changed = [key for key, signature in signatures.items() if self._woven.get(key) != signature]
        dropped = [key for key in self._woven if key not in signatures]
        if stuck := self._fixed.intersection(changed) or self._fixed.intersection(dropped):
            raise TargetError(
                f"{min(stuck)[1]}: the model was built with an adapter that changes its shape; build it again without it"
            )
        if not changed and not dropped:
            return 0
        self._prepare(changed, items)
        owners = {id(p): loaded for loaded, _ in layers for p in loaded.plan.placements}
        try:
            self._restore(dropped)
            self._write(changed, items, owners)
        except BaseException as error:
            self._abandon(set(changed) | set(self._woven))
            raise _ours(error) from None
        self._signatures, self._running = signatures, None
        self._layers = list(layers)
        return len(changed) + len(dropped)

    def _clone(self, layers: Sequence[tuple[Loaded, Strength]]) -> Program | None:
        """The program of another file of the same layout, pointed at this one's factors."""
        loaded = layers[0][0]
        if len(layers) > 1 or loaded.template is None or self._cuda not in loaded.slabs:
            return None
        for keys, program in self._programs.items():
            other = program.sole
            if len(keys) == 1 and other is not None and other.template == loaded.template and self._cuda in other.slabs:
                return program.clone(loaded, self._cuda)
        return None

    def _compile(self, layers: Sequence[tuple[Loaded, Strength]]) -> Program | None:
        """A program for these adapters, if the kernel can take every tensor of them."""
        full = Strength()
        items = items_by_tensor([(loaded.plan, full) for loaded, _ in layers], {})
        self._prepare(list(items), items)
        numbers = {id(p): i for i, (loaded, _) in enumerate(layers) for p in loaded.plan.placements}
        owners = {id(p): loaded for loaded, _ in layers for p in loaded.plan.placements}
        if not all(self._groupable(key, received) for key, received in items.items()):
            return None
        pairs = [pair for key, received in items.items() for pair in self._targets(key, received, owners)]
        targets = [target for target, _ in pairs]
        if len({t.base.dtype for t in targets}) > 1 or len({p.up.dtype for t in targets for p in t.products}) > 1:
            return None
        keys = {
            key: [(id(i.placement), numbers[id(i.placement)], i.placement) for i in received]
            for key, received in items.items()
        }
        products = [(numbers[id(item.placement)], item.placement) for _, used in pairs for item in used]
        return Program(keys, prepared(targets), products, layers[0][0] if len(layers) == 1 else None)

    def _forget(self, key: object) -> None:
        """Drop the programs of an adapter that left the cache: they hold its factors."""
        for keys in [keys for keys in self._programs if key in keys]:
            del self._programs[keys]

    def _prepare(self, changed: Sequence[TensorKey], items: Mapping[TensorKey, Sequence[Item]]) -> None:
        """Everything that can fail without having touched a weight."""
        for component, tensor in changed:
            network = self._networks.get(component)
            if network is None or tensor not in network.tensors:
                raise TargetError(
                    f"{component}.{tensor}: not a tensor of this model; the plan was made for another base"
                )
            for item in items[component, tensor]:
                placement = item.placement
                if placement.widen or placement.creates:
                    raise TargetError(
                        f"{tensor}: this adapter changes the model's shape; build the model from a MergedSource of it"
                    )
                if placement.shape != tuple(network.tensors[tensor].shape):
                    raise TargetError(
                        f"{tensor}: the plan expects {list(placement.shape)}, the model has {list(network.tensors[tensor].shape)}"
                    )
        for network in self._networks.values():
            network.pristine.check()
        for component, tensor in changed:
            network = self._networks[component]
            network.pristine.save(tensor, network.tensors[tensor])

    def _write(
        self, changed: Sequence[TensorKey], items: Mapping[TensorKey, Sequence[Item]], owners: Mapping[int, Loaded]
    ) -> None:
        targets: list[Target] = []
        scratch = Scratch()  # for all tensors of this stack
        for key in changed:
            if self._groupable(key, items[key]):
                targets += [target for target, _ in self._targets(key, items[key], owners)]
            else:
                self._write_one(key, items[key], scratch)
        merge_products(targets)

    def _write_one(self, key: TensorKey, received: Sequence[Item], scratch: Scratch) -> None:
        component, tensor = key
        network = self._networks[component]
        live = network.tensors[tensor]

        def original(name: str) -> torch.Tensor:
            live_tensor = network.tensors[name]
            return network.pristine.get(name, live_tensor).to(live_tensor.device)

        merge_into(live, original(tensor), received, original, scratch=scratch)

    def _groupable(self, key: TensorKey, received: Sequence[Item]) -> bool:
        """Whether the kernel can merge a tensor: only products, and the original on the same device."""
        network = self._networks[key[0]]
        live = network.tensors[key[1]]
        resident = live.is_cuda and network.pristine.is_resident()
        return resident and live.is_contiguous() and live.dim() > 1 and all(is_product(i.placement) for i in received)

    def _targets(
        self, key: TensorKey, received: Sequence[Item], owners: Mapping[int, Loaded]
    ) -> list[tuple[Target, list[Item]]]:
        network = self._networks[key[0]]
        live = network.tensors[key[1]]
        return targets_of(network.pristine.get(key[1], live), live, received, owners)

    def _restore(self, keys: Iterable[TensorKey]) -> None:
        lives, originals = [], []
        for component, tensor in keys:
            network = self._networks[component]
            lives.append(network.tensors[tensor])
            originals.append(network.pristine.get(tensor, lives[-1]))
        if lives:
            torch._foreach_copy_(lives, originals)

    def _abandon(self, keys: Iterable[TensorKey]) -> None:
        """After a failure: the base everywhere, and nothing woven."""
        self._signatures, self._running, self._layers = {}, None, []
        try:
            self._restore(keys)
        except Exception as error:
            raise InweaveError(f"the base could not be restored; build the model again: {error}") from error


class Program:
    """A compiled stack: one launch that can be run again at any strengths."""

    def __init__(
        self,
        tensors: Mapping[TensorKey, list[tuple[int, int, Placement]]],
        launch: Launch,
        products: Sequence[tuple[int, Placement]],
        sole: Loaded | None,
    ) -> None:
        self.tensors = tensors
        self.sole = sole  # the adapter, where there is only one
        self._launch = launch
        self._products = products  # in the launch's order; one may be there for several runs of rows
        self._scales = np.array([placement.factors.scale for _, placement in products])
        components = {name: number for number, name in enumerate(dict.fromkeys(p.component for _, p in products))}
        self._samples = [next(p for _, p in products if p.component == name) for name in components]
        self._which = np.array([(layer, components[p.component]) for layer, p in products])

    def clone(self, loaded: Loaded, device: torch.device) -> Program:
        """The same launch over another slab: offsets within it are the same, only its start differs."""
        assert self.sole is not None
        placements = loaded.plan.placements
        order = {id(old): new for old, new in zip(self.sole.plan.placements, placements, strict=True)}
        tensors = {
            key: [(id(order[id(p)]), layer, order[id(p)]) for _, layer, p in rows] for key, rows in self.tensors.items()
        }
        products = [(layer, order[id(p)]) for layer, p in self._products]
        launch = self._launch.moved(self.sole.slabs[device].numbers, loaded.slabs[device].numbers)
        return Program(tensors, launch, products, loaded)

    def run(self, strengths: Sequence[Strength]) -> None:
        table = np.array([[strength.at(sample, {}) for sample in self._samples] for strength in strengths])
        self._launch.rescale(self._scales * table[self._which[:, 0], self._which[:, 1]])
        self._launch.run()


def _ours(error: BaseException) -> BaseException:
    if isinstance(error, torch.OutOfMemoryError):
        return MemoryBudgetError(f"no device memory for this stack; the base was restored: {error}")
    return error
