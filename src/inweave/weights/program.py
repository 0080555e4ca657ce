"""A stack compiled for the GPU: one launch that can be repeated at any strengths, and moved to other factors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from inweave.ops.merge import prepare_merge
from inweave.weights.factors import LoadedAdapter
from inweave.weights.stack import Item, Strength, TensorKey
from inweave.weights.writer import Writer

if TYPE_CHECKING:  # imports triton
    from inweave.ops.merge.triton import PreparedMerge

#: adapters of a stack with their strengths
LoadedStack = Sequence[tuple[LoadedAdapter, Strength]]
Rows = Sequence[tuple[int, int]]  #: position in the stack, number of the placement in its plan


class MergeProgram:
    """One launch that merges a stack.

    ``tensors``: what each tensor receives, as (position in the stack, number of the placement in its plan). It is the
    same for all files of a layout, so clones share it. ``targets``: the tensor of each target.
    """

    def __init__(
        self,
        adapters: Sequence[LoadedAdapter],
        tensors: Mapping[TensorKey, Rows],
        targets: Sequence[TensorKey],
        launch: PreparedMerge,
        products: Rows,
    ) -> None:
        self.tensors = tensors
        self.sole = adapters[0] if len(adapters) == 1 else None  # the adapter, if there is only one
        self._targets = targets
        self._launch = launch
        self._products = products  # in the launch's order; one may appear for several runs of rows
        placements = [adapters[layer].plan.placements[number] for layer, number in products]
        self._scales = np.array([placement.factors.scale for placement in placements])
        samples = {placement.component: placement for placement in placements}
        names = {name: number for number, name in enumerate(samples)}
        self._samples = list(samples.values())
        layers, components = [layer for layer, _ in products], [names[p.component] for p in placements]
        self._which = np.array(layers), np.array(components)

    def clone(self, loaded: LoadedAdapter, device: torch.device) -> MergeProgram:
        """Return the same launch over another slab: offsets within it are the same, only its start differs."""
        assert self.sole is not None and len(self.sole.plan.placements) == len(loaded.plan.placements)
        launch = self._launch.moved(self.sole.slabs[device].numbers, loaded.slabs[device].numbers)
        return MergeProgram([loaded], self.tensors, self._targets, launch, self._products)

    def start(self, strengths: Sequence[Strength]) -> Callable[[], list[TensorKey]]:
        """Begin to write every tensor; the result waits, and returns those with numbers beyond the limit."""
        table = np.array([[strength.at(sample, {}) for sample in self._samples] for strength in strengths])
        with np.errstate(over="ignore"):  # a scale beyond float32 is infinite, and so is its result
            self._launch.rescale(self._scales * table[self._which])
        self._launch.start()
        return lambda: list(dict.fromkeys(self._targets[number] for number in self._launch.finish()))


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
    numbers = {
        id(p): (layer, number)
        for layer, loaded in enumerate(adapters)
        for number, p in enumerate(loaded.plan.placements)
    }
    owners = {id(p): loaded for loaded in adapters for p in loaded.plan.placements}
    pairs = [(key, *pair) for key, received in items.items() for pair in writer.targets(key, received, owners)]
    targets = [target for _, target, _ in pairs]
    if len({t.base.dtype for t in targets}) > 1 or len({p.up.dtype for t in targets for p in t.products}) > 1:
        return None
    return MergeProgram(
        adapters,
        {key: [numbers[id(item.placement)] for item in received] for key, received in items.items()},
        [key for key, _, _ in pairs],
        prepare_merge(targets),
        [numbers[id(item.placement)] for _, _, used in pairs for item in used],
    )
