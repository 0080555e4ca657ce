"""Adapters ready to be merged: resolved once, checked once, their factors on the device, in a bounded cache.

An adapter's factors are sent in one piece: the span of the mapped file that holds them goes through pinned
memory to the device, where every factor is a view.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from weakref import WeakMethod

import torch

from inweave.adapter import Adapter, Lora, Tensor
from inweave.errors import TargetError
from inweave.files.paths import as_path
from inweave.files.reading import open_regular
from inweave.files.stamps import ABSENT, path_stamp
from inweave.formats.files import Container, maps_of, open_container, refuse_truncated
from inweave.formats.finite import scan
from inweave.formats.read import read_container
from inweave.ops.merge import Product, WeightUpdate
from inweave.ops.tensors.decode import TORCH, decode
from inweave.targets.plan import Plan
from inweave.weights.layout_cache import Layout, is_template, layout_of, retargeted
from inweave.weights.stack import Item
from inweave.weights.transfer import ring_for

#: dtypes of factors that the kernel reads directly; others are decoded to float32 first
KERNEL_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Slab:
    """All factors of an adapter on a device, and where each begins, by the identity of its tensor."""

    numbers: torch.Tensor
    offsets: Mapping[int, int]


@dataclass(slots=True)
class LoadedAdapter:
    """A resolved adapter. ``views`` are its factors on a device, by the identity of their tensors."""

    key: object
    plan: Plan
    bytes: int
    name: str = "the adapter"  # its name in messages
    template: int | None = None  # files of one layout share a number
    views: dict[tuple[torch.device, int], torch.Tensor] = field(default_factory=dict)
    slabs: dict[torch.device, Slab] = field(default_factory=dict)
    scattered: bool = False  # its factors are not contiguous in the file
    checked: bool = False
    fingerprint: str = ""  # of its contents, once it was needed
    maps: list[mmap.mmap] = field(default_factory=list)  # sizes of the files that its tensors are views of

    def __post_init__(self) -> None:
        self.maps = maps_of(self.plan.adapter.tensors.values())

    def check_size(self) -> None:
        """Raise if a mapped file was truncated."""
        refuse_truncated(self.maps, self.name)

    def check_finite(self) -> None:
        """Raise if any number is NaN or infinite; checked once, on the device if the factors are there."""
        if self.checked:
            return
        sent = {number for slab in self.slabs.values() for number in slab.offsets}
        bad = [name for name, t in self.plan.adapter.tensors.items() if id(t) not in sent and scan(t).nonfinite]
        if not all(bool(torch.isfinite(slab.numbers).all()) for slab in self.slabs.values()):
            bad += [name for name, t in self.plan.adapter.tensors.items() if id(t) in sent and scan(t).nonfinite]
        if bad:
            more = f" and {len(bad) - 1} more tensors hold" if len(bad) > 1 else " holds"
            raise TargetError(f"{bad[0]}{more} NaN or infinity; nothing was applied")
        self.checked = True

    def on_device(self, tensor: Tensor, device: torch.device) -> torch.Tensor:
        """Return a factor on ``device``, as a matrix (first axis by the rest)."""
        key = (device, id(tensor))
        view = self.views.get(key)
        if view is None:
            slab = self.slabs.get(device)
            at = slab.offsets.get(id(tensor)) if slab is not None else None
            if slab is not None and at is not None:
                rows = tensor.shape[0]
                width = len(tensor.data) // slab.numbers.element_size() // rows
                view = slab.numbers.as_strided((rows, width), (width, 1), at)
            else:
                dtype = TORCH[tensor.dtype] if tensor.dtype in KERNEL_DTYPES else torch.float32
                view = decode(tensor, dtype=dtype, device=device).reshape(tensor.shape[0], -1).contiguous()
            self.views[key] = view
        return view

    def upload(self, device: torch.device) -> None:
        """Send all factors the kernel can read in one copy, if they are alike and lie side by side."""
        if device in self.slabs or self.scattered:
            return
        factors = {
            name: t for name, t in self.plan.adapter.tensors.items() if t.dtype in KERNEL_DTYPES and len(t.shape) > 1
        }
        dtypes = {tensor.dtype for tensor in factors.values()}
        locations = [self.plan.adapter.places.get(name) for name in factors]
        if len(dtypes) != 1 or None in locations or len({location[0] for location in locations if location}) != 1:
            self.scattered = True
            return
        path = next(location[0] for location in locations if location)
        starts = [location[1] for location in locations if location]
        item = next(iter(factors.values())).itemsize
        first = min(starts)
        last = max(start + len(t.data) for start, t in zip(starts, factors.values(), strict=True))
        total = sum(len(tensor.data) for tensor in factors.values())
        if last - first != total or any((start - first) % item for start in starts):
            self.scattered = True
            return
        with open_regular(path, buffering=0) as file:
            raw = ring_for(device).send_file(file, first, total)
        numbers = raw.view(TORCH[dtypes.pop()])
        offsets = {id(t): (start - first) // item for start, t in zip(starts, factors.values(), strict=True)}
        self.slabs[device] = Slab(numbers, offsets)


def product_of(item: Item, loaded: LoadedAdapter, device: torch.device) -> Product:
    """Return a placement's factors on the device, cut to its rows, with the scale they are applied at."""
    placement = item.placement
    factors = placement.factors
    if not isinstance(factors, Lora):
        raise TargetError(f"{placement.tensor}: {factors.kind} is not a product of two factors")
    up, down = loaded.on_device(factors.up, device), loaded.on_device(factors.down, device)
    if placement.source is not None:
        up = up[placement.source[0] : sum(placement.source)]
    return Product(up, down, factors.scale * item.strength)


def targets_of(
    original: torch.Tensor, live: torch.Tensor, items: Sequence[Item], owners: Mapping[int, LoadedAdapter]
) -> list[tuple[WeightUpdate, list[Item]]]:
    """Split ``live`` into runs of rows that receive the same products, each with its items, in order.

    Every row is in one run: rows that receive nothing now may have received something from the last stack.
    ``owners`` maps the id of each placement to its adapter.
    """
    out, base = live.view(live.shape[0], -1), original.view(original.shape[0], -1)
    products = [product_of(item, owners[id(item.placement)], live.device) for item in items]
    if all(item.placement.target is None for item in items):
        return [(WeightUpdate(base, out, tuple(products)), list(items))]
    ranges = [item.placement.rows() for item in items]
    borders = sorted({0, len(out), *(row for rows in ranges for row in (rows.start, rows.stop))})
    runs = []
    for start, stop in pairwise(borders):
        here = [number for number, rows in enumerate(ranges) if start in rows]
        cut = tuple(
            replace(
                products[number], up=products[number].up[start - ranges[number].start : stop - ranges[number].start]
            )
            for number in here
        )
        if cut or base.data_ptr() != out.data_ptr():
            runs.append((WeightUpdate(base[start:stop], out[start:stop], cut), [items[number] for number in here]))
    return runs


_MAX_PARTIAL_PLANS = 16


class AdapterCache:
    """Loaded adapters, the least recently used dropped first when their bytes exceed ``limit``.

    ``resolve`` and ``forget``: methods of the owner, held weakly: it is freed when it is deleted.
    """

    def __init__(self, resolve: Callable[[Adapter, bool], Plan], limit: int, forget: Callable[[object], None]) -> None:
        self._methods = WeakMethod(resolve), WeakMethod(forget)
        self._limit = limit
        self._loaded: OrderedDict[object, LoadedAdapter] = OrderedDict()
        self._lock = threading.RLock()
        self._plans_by_layout: dict[Layout, Plan] = {}
        self._partial_plans: OrderedDict[object, Plan] = OrderedDict()
        self._cleared = self._bytes = 0  # how often it was cleared; of all adapters
        self.mapped = True

    def clear(self) -> None:
        """Forget everything that was resolved."""
        with self._lock:
            self._cleared, self._bytes = self._cleared + 1, 0
            self._loaded.clear()
            self._plans_by_layout.clear()
            self._partial_plans.clear()

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._loaded)

    def _resolve(self, adapter: Adapter, strict: bool) -> Plan:
        resolve = self._methods[0]()
        assert resolve is not None
        return resolve(adapter, strict)

    def _forget(self, key: object) -> None:
        forget = self._methods[1]()
        assert forget is not None
        forget(key)

    def get(self, adapter: Adapter | Plan | str | os.PathLike[str], key: object = None) -> LoadedAdapter:
        """Return the adapter, resolved and checked, from the cache if it was seen before; ``key``: one of `keys`."""
        loaded = self.read(adapter, key)
        with self._lock:
            if loaded.key in self._loaded:
                self._loaded.move_to_end(loaded.key)
            while self._bytes > self._limit and len(self._loaded) > 1:
                key, dropped = self._loaded.popitem(last=False)
                self._bytes -= dropped.bytes
                self._forget(key)
            return loaded

    def read(self, adapter: Adapter | Plan | str | os.PathLike[str], key: object = None) -> LoadedAdapter:
        """Do as `get`, but drop none: for a thread that reads ahead. Other threads go on while it reads a file."""
        key = _key(adapter) if key is None else key
        while True:
            with self._lock:
                if key in self._loaded:
                    return self._loaded[key]
                cleared = self._cleared
            loaded = self._load(key, adapter)
            with self._lock:
                if cleared != self._cleared:
                    continue  # it was planned for other shapes
                if key not in self._loaded:
                    self._loaded[key] = loaded
                    self._bytes += loaded.bytes
                return self._loaded[key]

    def holds(self, adapter: Adapter | Plan | str | os.PathLike[str]) -> bool:
        """Return whether an adapter is in the cache."""
        with self._lock:
            return _key(adapter) in self._loaded

    def partial_plan(self, adapter: Adapter | str | os.PathLike[str]) -> Plan:
        """Return the plan of an adapter that may have tensors without a place; the same object for the same file."""
        with self._lock:
            key = _key(adapter)
            if key not in self._partial_plans:
                whole = (
                    adapter if isinstance(adapter, Adapter) else read_container(open_container(adapter, mapped=False))
                )
                self._partial_plans[key] = self._resolve(whole, False)
                while len(self._partial_plans) > _MAX_PARTIAL_PLANS:
                    self._partial_plans.popitem(last=False)
            self._partial_plans.move_to_end(key)
            return self._partial_plans[key]

    def keys(self, adapters: Iterable[Adapter | Plan | str | os.PathLike[str]]) -> tuple[object, ...]:
        """Return the cache keys of these adapters, in this order."""
        return tuple(map(_key, adapters))

    def put(self, adapter: Adapter | Plan | str | os.PathLike[str], plan: Plan) -> LoadedAdapter:
        """Keep a plan that was made elsewhere for the same networks."""
        with self._lock:
            key = _key(adapter)
            size = sum(len(tensor.data) for tensor in plan.adapter.tensors.values())
            loaded = LoadedAdapter(key, plan, size, _name(adapter))
            before = self._loaded.pop(key, None)
            self._bytes += loaded.bytes - (before.bytes if before is not None else 0)
            self._loaded[key] = loaded
            return loaded

    def _load(self, key: object, adapter: Adapter | Plan | str | os.PathLike[str]) -> LoadedAdapter:
        template = None
        if isinstance(adapter, Plan):
            plan = adapter
        elif isinstance(adapter, Adapter):
            plan = self._resolve(adapter, True)
        else:
            container = open_container(adapter, mapped=self.mapped)
            plan, template = self._plan_of(container)
        size = sum(len(tensor.data) for tensor in plan.adapter.tensors.values())
        return LoadedAdapter(key, plan, size, _name(adapter), template)

    def _plan_of(self, container: Container) -> tuple[Plan, int | None]:
        """Return the plan of a file, and the number of its layout if other files may share it."""
        layout = layout_of(container)
        known = self._plans_by_layout.get(layout)
        if known is not None:
            return retargeted(known, container), id(known)
        plan = self._resolve(read_container(container), True)
        if not is_template(plan):
            return plan, None
        with self._lock:
            while len(self._plans_by_layout) >= 16:
                self._plans_by_layout.pop(next(iter(self._plans_by_layout)))
            self._plans_by_layout[layout] = plan
        return plan, id(plan)


def _key(adapter: Adapter | Plan | str | os.PathLike[str]) -> object:
    if isinstance(adapter, Adapter | Plan):
        return id(adapter)
    path = as_path(adapter)
    stamp = path_stamp(path)
    return str(path) if stamp == ABSENT else stamp


def _name(adapter: Adapter | Plan | str | os.PathLike[str]) -> str:
    return as_path(adapter).name if isinstance(adapter, str | os.PathLike) else "the adapter"
