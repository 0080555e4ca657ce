"""Several adapters in one forward pass: every row of a batch has its own, added to the outputs of layers.

    adapters = RowAdapters(Weaver({"unet": unet}))
    slots = adapters.load(["a.safetensors", "b.safetensors"])
    with adapters.acting("unet", slots) as rows:
        rows.fill([[(slots[0], 0.8)], [(slots[1], 1.0)]])      of row 0, of row 1
        unet(...)

    merged     y = x (W + c up down)^T
    added      y = x W^T + c (x down^T) up^T                   the same sum, rounded elsewhere

Weights keep their numbers, with what a `Weaver` has merged into them. A change that is not a product of two factors, or
that the layer does not get as its own output plus something, cannot be added: `obstacle` says why. Two things are seen
only in a forward pass: `probe` finds layers whose inputs do not have one entry per row of the batch, and layers whose
weight is read without a call.

Adapters stay in memory, at most `MOST_SLOTS` of them; then the least recently used one makes room for another.

Which adapters rows have, and at which strengths, is in device memory, and so are the factors, which are written in
place: a recorded call of a network stays valid while `layout` is the same, whatever the rows are filled with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from inweave.errors import InweaveError
from inweave.ops.common.select import has_kernels
from inweave.ops.kinds import registered_kind
from inweave.ops.quantized import QuantizedLayer
from inweave.ops.rowwise import RowTable
from inweave.targets.plan import Placement, Plan
from inweave.weights.factors import LoadedAdapter, product_of
from inweave.weights.layer_slots import LayerProduct, LayerSlots, RowCount
from inweave.weights.merge import is_product
from inweave.weights.networks import quantized_layers, slots
from inweave.weights.stack import AdapterLike, Item, TensorKey
from inweave.weights.weaver import Weaver

MOST_SLOTS = 32
_FORWARDS = (nn.Linear.forward, nn.Conv2d.forward)


class RowAdapters:
    """The adapters that rows of a batch may have, in slots, on the networks of a Weaver, which finds their places."""

    def __init__(self, weaver: Weaver) -> None:
        self._weaver, networks = weaver, weaver.networks
        self._layers: dict[TensorKey, LayerSlots] = {}
        self._modules: dict[TensorKey, nn.Module] = {}
        for component, network in networks.items():
            for name, slot in slots(network).items():
                if slot.leaf == "weight":
                    self._modules[component, name] = slot.module
            for path, layer in quantized_layers(network).items():
                self._modules[component, f"{path}.weight" if path else "weight"] = layer
        self._tables = {name: RowTable(_device_of(network)) for name, network in networks.items()}
        self._rows = {name: RowCount(table) for name, table in self._tables.items()}
        # with the plans, by whose ids the adapters in memory are known
        self._slots: OrderedDict[object, tuple[int, Plan]] = OrderedDict()
        self._refused: dict[TensorKey, str] = {}
        self._probed: set[str] = set()
        self._layouts: dict[str, tuple[str, ...]] = {}  # names of the layers that add, by network
        self.active = 0  # blocks of `acting` that are open

    def obstacle(self, plan: Plan) -> str:
        """Return why an adapter cannot be added to the outputs of layers; "" if it can."""
        for placement in plan.placements:
            if reason := self._refused.get(_key(placement)) or self._obstacle(placement):
                return f"{placement.tensor}: {reason}"
        return ""

    def _obstacle(self, placement: Placement) -> str:
        module, factors = self._modules.get(_key(placement)), placement.factors
        if isinstance(module, QuantizedLayer):
            return "the weight is quantized; merged into it, a LoRA is rounded, so that its images are others"
        if getattr(factors, "magnitude", None) is not None:
            return "DoRA is not a product of two factors"
        if not is_product(placement) or placement.creates:
            return f"{factors.algorithm} is not a product of two factors, or not on this tensor"
        if module is None or not _is_plain(module):
            kind = "parameter" if module is None else type(module).__name__
            return f"a {kind} takes no products beside its weight"
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            return "the convolution has groups"
        return ""

    @torch.no_grad()
    def load(self, adapters: Sequence[AdapterLike]) -> list[int]:
        """Return the slots of adapters, after writing the factors of those that have none yet.

        Raises:
            TargetError: an adapter has numbers that are not finite.
            InweaveError: there are more adapters than `MOST_SLOTS`.
        """
        loaded = [self._weaver.loaded(adapter) for adapter in adapters]
        needed = {each.key for each in loaded}
        if len(needed) > MOST_SLOTS:
            raise InweaveError(f"{len(needed)} adapters; at most {MOST_SLOTS} can be added to the rows of a batch")
        for each in loaded:
            if each.key in self._slots:
                self._slots.move_to_end(each.key)
                continue
            each.check_size()
            for device in {table.device for table in self._tables.values()}:
                if has_kernels(device):
                    each.upload(device)  # in one copy, instead of one for each factor
            each.check_finite()
            slot = self._free_slot(needed)
            self._write(slot, each)
            self._slots[each.key] = slot, each.plan
        return [self._slots[each.key][0] for each in loaded]

    def _free_slot(self, needed: Collection[object]) -> int:
        """Return a number without an adapter; if there is none, the least recently used one leaves."""
        busy = {slot for slot, _ in self._slots.values()}
        if len(busy) < MOST_SLOTS:
            return next(slot for slot in range(MOST_SLOTS) if slot not in busy)
        slot, _ = self._slots.pop(next(key for key in self._slots if key not in needed))
        for layer in self._layers.values():
            layer.put(slot, ())
        return slot

    def _write(self, slot: int, loaded: LoadedAdapter) -> None:
        products: dict[TensorKey, list[LayerProduct]] = {}
        for placement in loaded.plan.placements:
            product = product_of(Item(placement, 1.0), loaded, self._tables[placement.component].device)
            products.setdefault(_key(placement), []).append(
                LayerProduct(product.down, product.up, product.scale, placement.rows())
            )
        for key, every in products.items():
            self._layer(key).put(slot, every)

    def _layer(self, key: TensorKey) -> LayerSlots:
        if key not in self._layers:
            table, rows = self._tables[key[0]], self._rows[key[0]]
            self._layers[key] = LayerSlots(key[1].removesuffix(".weight"), self._modules[key], table, rows, MOST_SLOTS)
        return self._layers[key]

    @contextmanager
    def acting(self, component: str, slots: Collection[int]) -> Iterator[RowCount]:
        """Let the layers of a network add these slots inside the block, as the rows in it are filled."""
        own = self._acting(component, slots)
        for layer in own:
            layer.calls = 0
            layer.attach()
        self._layouts[component] = tuple(layer.name for layer in own)
        self.active += 1
        try:
            yield self._rows[component]
        finally:
            self.active -= 1
            self._layouts.pop(component, None)
            for layer in own:
                layer.detach()

    def layout(self, component: str, x: Tensor) -> Hashable:
        """Return what a recorded call of a network with input ``x`` relies on here; None if nothing is added.

        Raises:
            InweaveError: the input does not have one entry per row.
        """
        if component not in self._layouts:
            return None
        rows = self._rows[component]
        rows.check(component, x)
        return rows.moves, self._layouts[component]

    def _acting(self, component: str, slots: Collection[int]) -> list[LayerSlots]:
        return [layer for key, layer in self._layers.items() if key[0] == component and any(map(layer.rank, slots))]

    def refuse_uncalled(self, component: str, slots: Collection[int]) -> bool:
        """Refuse layers that were not called in the last `acting` block; return whether there are any."""
        uncalled = [layer for layer in self._acting(component, slots) if not layer.calls]
        for layer in uncalled:
            self._refused[component, f"{layer.name}.weight"] = "the weight is read without a call of its layer"
        return bool(uncalled)

    def is_probed(self, component: str) -> bool:
        """Return whether `probe` was called for a network."""
        return component in self._probed

    def probe(self, component: str, rows: int, call: Callable[[], object]) -> None:
        """Refuse the layers of a network whose inputs do not have one entry per row; once for each network.

        ``call``: calls the network once, with ``rows`` rows.
        """
        if component in self._probed:
            return
        shapes: dict[int, list[bool]] = {}

        def look(module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
            by_rows = bool(inputs) and isinstance(inputs[0], Tensor) and inputs[0].shape[:1] == (rows,)
            shapes.setdefault(id(module), []).append(by_rows)

        own = {key: module for key, module in self._modules.items() if key[0] == component}
        handles = [module.register_forward_hook(look) for module in own.values()]
        try:
            call()
        finally:
            for handle in handles:
                handle.remove()
        for key, module in own.items():
            seen = shapes.get(id(module))
            if seen is None:
                self._refused[key] = "the weight is read without a call of its layer"
            elif not all(seen):
                self._refused[key] = "the layer's input does not have one entry per row of the batch"
        self._probed.add(component)


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module computes exactly what a linear layer or a convolution does."""
    own = type(module)
    return registered_kind(module) is None and (own.forward in _FORWARDS or getattr(own, "computes_plainly", False))


def _key(placement: Placement) -> TensorKey:
    return placement.component, placement.tensor


def _device_of(network: nn.Module) -> torch.device:
    return next(iter([*network.parameters(), *network.buffers()])).device
