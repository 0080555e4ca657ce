"""A stack compiled for the GPU: one launch that can be repeated at any strengths, and moved to other factors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from inweave.ops.merge import prepare_merge
from inweave.targets.plan import Placement
from inweave.weights.factors import LoadedAdapter
from inweave.weights.stack import Item, Strength, TensorKey
from inweave.weights.writer import Writer

if TYPE_CHECKING:  # imports triton
    from inweave.ops.merge.triton import PreparedMerge

#: adapters of a stack with their strengths
LoadedStack = Sequence[tuple[LoadedAdapter, Strength]]


class MergeProgram:
    """One launch that merges a stack.

    ``tensors``: what each tensor receives, as (id, position in the stack, placement); ``targets``: the tensor of each
    target.
    """

    def __init__(
        self,
        tensors: Mapping[TensorKey, list[tuple[int, int, Placement]]],
        targets: Sequence[TensorKey],
        launch: PreparedMerge,
        products: Sequence[tuple[int, Placement]],
        sole: LoadedAdapter | None,
    ) -> None:
        self.tensors = tensors
        self.sole = sole  # the adapter, if there is only one
        self._targets = targets
        self._launch = launch
        self._products = products  # in the launch's order; one may appear for several runs of rows
        self._scales = np.array([placement.factors.scale for _, placement in products])
        components = {name: number for number, name in enumerate(dict.fromkeys(p.component for _, p in products))}
        self._samples = [next(p for _, p in products if p.component == name) for name in components]
        self._which = np.array([(layer, components[p.component]) for layer, p in products])

    def clone(self, loaded: LoadedAdapter, device: torch.device) -> MergeProgram:
        """Return the same launch over another slab: offsets within it are the same, only its start differs."""
        assert self.sole is not None
        placements = loaded.plan.placements
        order = {id(old): new for old, new in zip(self.sole.plan.placements, placements, strict=True)}
        tensors = {
            key: [(id(order[id(p)]), layer, order[id(p)]) for _, layer, p in rows] for key, rows in self.tensors.items()
        }
        products = [(layer, order[id(p)]) for layer, p in self._products]
        launch = self._launch.moved(self.sole.slabs[device].numbers, loaded.slabs[device].numbers)
        return MergeProgram(tensors, self._targets, launch, products, loaded)

    def run(self, strengths: Sequence[Strength]) -> list[TensorKey]:
        """Write every tensor; returns those with numbers beyond the limit."""
        table = np.array([[strength.at(sample, {}) for sample in self._samples] for strength in strengths])
        with np.errstate(over="ignore"):  # a scale beyond float32 is infinite, and so is its result
            self._launch.rescale(self._scales * table[self._which[:, 0], self._which[:, 1]])
        return list(dict.fromkeys(self._targets[number] for number in self._launch.run()))


def cloned(programs: Iterable[MergeProgram], stack: LoadedStack, device: torch.device) -> MergeProgram | None:
    """Return the program of another file of the same layout, pointed at the factors of this stack's only adapter."""
    loaded = stack[0][0]
    if len(stack) > 1 or loaded.template is None or device not in loaded.slabs:
        return None
    for program in programs:
        other = program.sole
        if other is not None and other.template == loaded.template and device in other.slabs:
            return program.clone(loaded, device)
    return None


def compiled(
    writer: Writer, adapters: Sequence[LoadedAdapter], items: Mapping[TensorKey, Sequence[Item]]
) -> MergeProgram | None:
    """Return a program for these adapters, whose ``items`` are prepared, if the kernel can take every tensor of
    them.
    """
    if not all(writer.groupable(key, received) for key, received in items.items()):
        return None
    numbers = {id(p): number for number, loaded in enumerate(adapters) for p in loaded.plan.placements}
    owners = {id(p): loaded for loaded in adapters for p in loaded.plan.placements}
    pairs = [(key, *pair) for key, received in items.items() for pair in writer.targets(key, received, owners)]
    targets = [target for _, target, _ in pairs]
    if len({t.base.dtype for t in targets}) > 1 or len({p.up.dtype for t in targets for p in t.products}) > 1:
        return None
    keys = {
        key: [(id(i.placement), numbers[id(i.placement)], i.placement) for i in received]
        for key, received in items.items()
    }
    products = [(numbers[id(item.placement)], item.placement) for _, _, used in pairs for item in used]
    return MergeProgram(
        keys,
        [key for key, _, _ in pairs],
        prepare_merge(targets),
        products,
        adapters[0] if len(adapters) == 1 else None,
    )
