"""Adapters ready to be woven: resolved once, checked once, their factors on the device, all in a bounded cache.

An adapter's factors travel in one piece: the span of the mapped file that holds them goes through pinned
memory to the device, where every factor is a view.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from weft.adapter import Adapter, Lora, Tensor
from weft.errors import TargetError
from weft.formats.files import Container, open_container
from weft.formats.finite import scan
from weft.formats.read import read
from weft.ops.decode import TORCH, decode
from weft.ops.merge import Product
from weft.targets.plan import Plan
from weft.weights.stack import Item
from weft.weights.template import Layout, is_template, layout_of, retargeted
from weft.weights.transfer import ring_for

#: factors the kernel reads as they are; anything else is decoded to float32 first
KERNEL_DTYPES = ("F32", "F16", "BF16")


@dataclass(slots=True)
class Loaded:
    """A resolved adapter. ``views`` are its factors on a device, by the identity of their tensors."""

    key: object
    plan: Plan
    bytes: int
    views: dict[tuple[torch.device, int], torch.Tensor] = field(default_factory=dict)
    spans: list[torch.Tensor] = field(default_factory=list)
    checked: bool = False

    def check_finite(self) -> None:
        """Raise if any number is NaN or infinite; looked at once, on the device where the factors are there."""
        if self.checked:
            return
        on_device = {place for _, place in self.views}
        seen = [(name, t) for name, t in self.plan.adapter.tensors.items() if id(t) not in on_device]
        bad = [name for name, tensor in seen if scan(tensor).nonfinite]
        if not bad and self.views:
            sums = torch.stack([torch.isfinite(view).all() for view in self._spans()])
            if not bool(sums.all()):
                bad = [name for name, t in self.plan.adapter.tensors.items() if scan(t).nonfinite]
        if bad:
            more = f" and {len(bad) - 1} more tensors hold" if len(bad) > 1 else " holds"
            raise TargetError(f"{bad[0]}{more} NaN or infinity; nothing was applied")
        self.checked = True

    def _spans(self) -> list[torch.Tensor]:
        return self.spans or list(self.views.values())

    def on_device(self, tensor: Tensor, device: torch.device) -> torch.Tensor:
        """A factor on ``device``, as a matrix (first axis by the rest)."""
        place = (device, id(tensor))
        found = self.views.get(place)
        if found is None:
            dtype = TORCH[tensor.dtype] if tensor.dtype in KERNEL_DTYPES else torch.float32
            found = decode(tensor, dtype=dtype, device=device).reshape(tensor.shape[0], -1).contiguous()
            self.views[place] = found
        return found

    def upload(self, device: torch.device) -> None:
        """Send all factors the kernel can read in one copy, if they lie close together."""
        if any(place[0] == device for place in self.views):
            return
        tensors = [t for t in self.plan.adapter.tensors.values() if t.dtype in KERNEL_DTYPES and len(t.shape) > 1]
        if not tensors:
            return
        places = np.array([(address(t), len(t.data)) for t in tensors], dtype=np.int64)
        first, last = int(places[:, 0].min()), int((places[:, 0] + places[:, 1]).max())
        if last - first > 1.25 * int(places[:, 1].sum()) + 65536:
            return
        span = np.ctypeslib.as_array((ctypes.c_uint8 * (last - first)).from_address(first))
        resident = ring_for(device).send(torch.from_numpy(span))
        alike = len({t.dtype for t in tensors}) == 1 and int(places[:, 1].sum()) == last - first
        whole = resident.view(TORCH[tensors[0].dtype]) if alike else None
        self.spans = [whole] if whole is not None else []
        for tensor, (start, length) in zip(tensors, places.tolist(), strict=True):
            at, item = start - first, tensor.itemsize
            if whole is not None and at % item == 0:
                rows = tensor.shape[0]
                width = length // item // rows
                self.views[device, id(tensor)] = whole.as_strided((rows, width), (width, 1), at // item)
            elif at % item == 0:
                raw = resident[at : at + length]
                self.views[device, id(tensor)] = raw.view(TORCH[tensor.dtype]).view(tensor.shape[0], -1)


def product_of(item: Item, loaded: Loaded, device: torch.device) -> Product:
    """A placement's factors on the device, cut to its rows, with the scale they are applied at."""
    place = item.placement
    factors = place.factors
    if not isinstance(factors, Lora):
        raise TargetError(f"{place.tensor}: {factors.kind} is not a product of two factors")
    up, down = loaded.on_device(factors.up, device), loaded.on_device(factors.down, device)
    if place.source is not None:
        up = up[place.source[0] : sum(place.source)]
    return Product(up, down, factors.scale * item.strength)


def address(tensor: Tensor) -> int:
    """Where a tensor's bytes lie in this process."""
    return int(np.frombuffer(tensor.data, dtype=np.uint8).__array_interface__["data"][0]) if len(tensor.data) else 0


class AdapterCache:
    """Loaded adapters, the least recently used dropped first when their bytes exceed ``limit``."""

    def __init__(self, resolve: Callable[[Adapter], Plan], limit: int, forget: Callable[[object], None]) -> None:
        self._resolve = resolve
        self._forget = forget
        self._limit = limit
        self._kept: OrderedDict[object, Loaded] = OrderedDict()
        self._lock = threading.Lock()
        self._templates: dict[Layout, Plan] = {}

    @property
    def bytes(self) -> int:
        return sum(loaded.bytes for loaded in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, adapter: Adapter | Plan | str | os.PathLike[str]) -> Loaded:
        """The adapter, resolved and checked; from the cache where it has been seen before."""
        with self._lock:
            key = _key(adapter)
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            loaded = self._load(key, adapter)
            self._kept[key] = loaded
            while self.bytes > self._limit and len(self._kept) > 1:
                self._forget(self._kept.popitem(last=False)[0])
            return loaded

    def _load(self, key: object, adapter: Adapter | Plan | str | os.PathLike[str]) -> Loaded:
        if isinstance(adapter, Plan):
            plan = adapter
        else:
            plan = self._resolve(adapter) if isinstance(adapter, Adapter) else self._plan_of(open_container(adapter))
        return Loaded(key, plan, sum(len(tensor.data) for tensor in plan.adapter.tensors.values()))

    def _plan_of(self, container: Container) -> Plan:
        layout = layout_of(container)
        known = self._templates.get(layout)
        if known is not None:
            return retargeted(known, container.tensors, container.metadata)
        plan = self._resolve(read(container.tensors, container.metadata, container.config))
        if is_template(plan):
            while len(self._templates) >= 16:
                self._templates.pop(next(iter(self._templates)))
            self._templates[layout] = plan
        return plan


def _key(adapter: Adapter | Plan | str | os.PathLike[str]) -> object:
    if isinstance(adapter, Adapter | Plan):
        return id(adapter)
    path = Path(adapter)
    try:
        found = path.stat()
    except OSError:
        return str(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
