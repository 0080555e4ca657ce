"""A source that merges adapters while weights are read: every model becomes LoRA-capable without knowing it.

    MergedSource(base, [(plan, strength), ...]).get(name) = round(base + sum_i strength_i * delta_i)

Tensors no adapter touches come straight from the base, uncopied. Besides the base and the adapters, one
tensor at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from weft.errors import TargetError
from weft.targets.index import ModelIndex
from weft.targets.plan import Plan
from weft.weights.merge import merged
from weft.weights.source import TensorSpec, WeightSource
from weft.weights.stack import Item, Strength, block_names, items_by_tensor

Stack = Iterable[tuple[Plan, float | Strength]]


class MergedSource:
    """``component`` names the network ``base`` holds; placements for other networks are not its business."""

    def __init__(
        self, base: WeightSource, stack: Stack, *, component: str | None = None, index: ModelIndex | None = None
    ) -> None:
        self._base = base
        checked = [(plan, Strength.of(strength)) for plan, strength in stack]
        blocks = block_names(index) if index is not None else {}
        self._items: dict[str, list[Item]] = {}
        for (name, tensor), items in items_by_tensor(checked, blocks).items():
            if component is None or name == component:
                self._items.setdefault(tensor, []).extend(items)
        self._created = {
            tensor: items for tensor, items in self._items.items() if all(item.placement.creates for item in items)
        }
        known = base.names()
        lost = [tensor for tensor in self._items if tensor not in known and tensor not in self._created]
        if lost:
            raise TargetError(
                f"{len(lost)} tensors of the plan are not in this source, {lost[0]!r} first: "
                "the plan was made for another base or another naming"
            )

    def names(self) -> Collection[str]:
        return [*self._base.names(), *(name for name in self._created if name not in self._base.names())]

    def spec(self, name: str) -> TensorSpec:
        items = self._items.get(name, [])
        if items and name in self._created and name not in self._base.names():
            return TensorSpec(items[0].placement.shape, torch.float32)
        found = self._base.spec(name)
        widened = next((item.placement.widen for item in items if item.placement.widen), None)
        return TensorSpec(widened, found.dtype) if widened else found

    def get(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        items = self._items.get(name)
        if not items:
            return self._base.get(name, dtype=dtype, device=device)
        if name in self._created and name not in self._base.names():
            base = torch.zeros(items[0].placement.shape, device=device)
        else:
            base = self._base.get(name, device=device)
        return merged(base, items, lambda other: self._base.get(other, device=device), dtype or base.dtype)
