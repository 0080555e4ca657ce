"""A source that merges adapters while weights are read: any model that loads from a source supports LoRAs.

    MergedSource(base, [(plan, strength), ...]).get(name) = round(base + sum_i strength_i * delta_i)

Tensors that no adapter changes come straight from the base, uncopied. One that is changed is read into memory of
its own, never through a map: besides the result and the adapters, at most one tensor (in float32) is in memory, plus
the temporaries of algorithms other than plain LoRA. That tensor is a `Scratch` owned by the source: it grows to
the largest tensor, serves all of them, and is freed with the source or by `release`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial

import torch

from inweave.arguments import expect
from inweave.errors import ConfigError, TargetError
from inweave.ops.merge import merge_products
from inweave.ops.quantized import QuantizedWeight
from inweave.targets.index import ModelIndex, component_from_names
from inweave.targets.plan import Plan, Rows
from inweave.weights.blocks import block_names, refuse_unknown_blocks
from inweave.weights.factors import LoadedAdapter, targets_of
from inweave.weights.held import quantized_weight
from inweave.weights.merge import is_product, merged, on_rows, refuse_overflow
from inweave.weights.networks import index_of
from inweave.weights.resolved import resolve_item
from inweave.weights.scratch import Scratch
from inweave.weights.source import TensorSpec, WeightSource
from inweave.weights.stack import Item, StackEntry, canonical, items_by_tensor, read_stack

Stack = Iterable[StackEntry]


class MergedSource:
    """A base with a stack of adapters merged in as it is read.

    Args:
        base: The unmerged weights.
        stack: (adapter, strength) pairs or "NAME[:STRENGTH]"; an adapter is a `Plan`, an `Adapter` or a path. Or a
            future of them, while another thread resolves it: tensors that do not depend on it can be read meanwhile.
        component: The network that ``base`` holds; placements for other networks are ignored.
        index: The model that adapters are resolved on; None: that of ``base``.

    Raises:
        ConfigError: ``base`` is not a weight source, or ``component`` is not in the model.
        TargetError: An adapter does not fit the base.
    """

    def __init__(
        self,
        base: WeightSource,
        stack: Stack | Future[Stack],
        *,
        component: str | None = None,
        index: ModelIndex | None = None,
    ) -> None:
        if not isinstance(base, WeightSource):
            raise ConfigError(f"expected a weight source such as FileSource, got {type(base).__name__}")
        expect("component", component, str, type(None))
        expect("index", index, ModelIndex, type(None))
        self.base = self._base = base
        self._component, self._index = component, index
        self._scratch = Scratch()
        self._pending = stack if isinstance(stack, Future) else None
        if not isinstance(stack, Future):
            self._take(stack)

    @property
    def settled(self) -> bool:
        """Whether the stack is known; never blocks."""
        return self._pending is None or self._pending.done()

    def settle(self) -> None:
        """Wait for the stack; errors from resolving it are raised here."""
        if self._pending is not None:
            stack, self._pending = self._pending.result(), None
            self._take(stack)

    def _take(self, stack: Stack) -> None:
        base, component, index = self._base, self._component, self._index
        entries = read_stack(stack)
        if any(not isinstance(adapter, Plan) or strength.blocks for adapter, strength in entries):
            index = _with_component(index_of(base), component) if index is None else index
            if component is not None and component not in index.components:
                has = ", ".join(index.components)
                raise ConfigError(
                    f"component: {component!r} is not in the model, which has {has}; nothing would be merged"
                )
        layers = [resolve_item(adapter, strength, index or ModelIndex({})) for adapter, strength in entries]
        checked = canonical([(layer.plan, layer.strength) for layer in layers], lambda layer: layer)
        self._plans = [plan for plan, _ in checked]
        blocks = block_names(index) if index is not None else {}
        for _, strength in checked:
            refuse_unknown_blocks(strength.blocks, blocks, index)
        self._items: dict[str, list[Item]] = {}
        for (name, tensor), items in items_by_tensor(checked, blocks).items():
            if component is None or name == component:
                self._items.setdefault(tensor, []).extend(items)
        self._created = {
            tensor: items for tensor, items in self._items.items() if all(item.placement.creates for item in items)
        }
        known = base.names()
        absent = [tensor for tensor in self._items if tensor not in known and tensor not in self._created]
        self._names = dict.fromkeys([*known, *self._created]).keys()
        if absent:
            raise TargetError(
                f"{len(absent)} tensors of the plan are not in this source, {absent[0]!r} first: "
                "the plan was made for another base or another naming"
            )

    def changes(self, name: str) -> bool:
        """Return whether an adapter changes ``name``."""
        self.settle()
        return name in self._items

    def deferrable(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether ``name`` may be read unmerged and merged in place later, by `weave`, without rounding
        twice.
        """
        self.settle()
        items = self._items.get(name, [])
        plain = all(is_product(item.placement) and not item.placement.creates for item in items)
        return plain and bool(items) and self._base.spec(name).dtype == dtype

    def plain(self, name: str, *, device: torch.device | str) -> torch.Tensor:
        """Return the base's tensor, to be merged into."""
        return self._base.get(name, device=device, owned=True)

    def weave(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Merge into tensors that `plain` returned, all of them in one launch."""
        loaded = {id(plan): LoadedAdapter(id(plan), plan, 0) for plan in self._plans}
        owners = {id(p): loaded[id(plan)] for plan in self._plans for p in plan.placements}
        device = next(iter(tensors.values())).device
        for each in loaded.values():
            each.upload(device)
        runs = [
            (name, target)
            for name, tensor in tensors.items()
            for target, _ in targets_of(tensor, tensor, self._items[name], owners)
        ]
        for name in dict.fromkeys(runs[number][0] for number in merge_products([target for _, target in runs])):
            refuse_overflow(partial(self._label, name), tensors[name], partial(self._base.get, name, device=device))

    def _label(self, name: str) -> str:
        """Return a tensor's name with the files that change it, for messages."""
        placements = {id(item.placement) for item in self._items[name]}
        adapters = [plan.adapter for plan in self._plans if any(id(p) in placements for p in plan.placements)]
        files = dict.fromkeys(path.name for adapter in adapters for path, _ in adapter.places.values())
        return f"{', '.join(files)}: {name}" if files else name

    def release(self) -> None:
        """Give the memory for merging back; the next merge takes new memory."""
        self._scratch.release()

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        self.settle()
        return self._names

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of one tensor, without reading its data."""
        self.settle()
        items = self._items.get(name, [])
        if items and name in self._created and name not in self._base.names():
            return TensorSpec(items[0].placement.shape, torch.float32)
        spec = self._base.spec(name)
        widened = next((item.placement.widen for item in items if item.placement.widen), None)
        return TensorSpec(widened, spec.dtype) if widened else spec

    def get(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: Rows | None = None,
        owned: bool = False,
    ) -> torch.Tensor:
        """Return one tensor; see `WeightSource.get`."""
        self.settle()
        items = self._items.get(name)
        if not items:
            return self._base.get(name, dtype=dtype, device=device, rows=rows, owned=owned)
        cut = rows if rows and all(is_product(i.placement) and not i.placement.creates for i in items) else None
        if name in self._created and name not in self._base.names():
            base = torch.zeros(items[0].placement.shape, device=device)
        else:
            base = self._base.get(name, device=device, rows=cut, owned=True)
        if cut is not None:
            items = on_rows(items, cut[0], sum(cut))
        read = partial(self._base.get, device=device, owned=True)
        result = merged(base, items, read, dtype, owned=True, scratch=self._scratch)
        if name not in self._created:
            before = partial(self._base.get, name, device=device, rows=cut)
            refuse_overflow(partial(self._label, name), result, before)
        # a copy of the rows, so that the rest can be freed
        return result if rows is None or cut else result[rows[0] : sum(rows)].clone()

    def quantized(self, name: str, device: torch.device | str, rows: Rows | None = None) -> QuantizedWeight | None:
        """Return a weight that no adapter changes as the base stores it; see `quantized_weight`."""
        return None if self.changes(name) else quantized_weight(self._base, name, device, rows)


def _with_component(index: ModelIndex, component: str | None) -> ModelIndex:
    """Return the index with its only network named ``component``, if tensor names do not identify it."""
    if component is None or component in index.components or len(index.components) != 1:
        return index
    (only,) = index.components.values()
    return ModelIndex({component: component_from_names(component, only.shapes)})
