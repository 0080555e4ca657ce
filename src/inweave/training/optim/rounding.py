"""Factors in the dtype of the model, for one micro-batch: all of them are rounded by one kernel, and layers read the copies.

    each layer        `Branch.rounded`: copies of its factors, and where their gradients are added up
    several layers    `Siblings.factors`: the same for layers of one input, whose factors lie side by side in the flat buffers

Layers that read one tensor in many places (`SharedSiblings`) compute before all blocks; not where a block is computed again in the
backward pass, when their outputs are gone, or compiled, since it would be compiled for each place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from operator import is_not

import torch
from torch import nn

from inweave.layers import lora_layers
from inweave.layers.branch import Branch
from inweave.layers.siblings import SharedSiblings, SiblingFactors, Siblings
from inweave.ops.linear import Rounded
from inweave.training.optim.flat import FlatParameters


class RoundedFactors:
    """The copies of one run's factors; they are made again whenever `active` is entered."""

    def __init__(self, flat: FlatParameters, networks: Mapping[str, nn.Module], dtype: torch.dtype) -> None:
        self._flat, self._networks, self._dtype = flat, networks, dtype
        self._values = flat.rounded(dtype)
        self._grads = flat.gradients()
        self._names = {id(parameter): name for name, parameter in flat.parameters.items()}
        self._copies = [
            (branch, self._of_branch(branch))
            for network in networks.values()
            for layer in lora_layers(network).values()
            for branch in map(layer.branch, layer.adapters)
        ]
        self._groups: list[_Group] | None = None

    @contextmanager
    def active(self, *, shared: bool) -> Iterator[None]:
        """Inside the block layers compute with the copies. ``shared``: some also for many places at once.

        Gradients of the factors are added to the flat gradients; the parameters must not change inside.
        """
        self._flat.rounded(self._dtype)
        if self._groups is None:  # blocks are fused after the step is made
            self._groups = [_Group(each) for network in self._networks.values() for each in sibling_groups(network)]
        for each in self._groups:
            if each.is_new():
                each.factors = self._of_group(each.siblings)
        groups = [
            (each.siblings, each.factors)
            for each in self._groups
            if each.factors is not None and (shared or type(each.siblings) is not SharedSiblings)
        ]
        try:
            for branch, copies in self._copies:
                branch.rounded = copies
            for group, factors in groups:
                group.factors = factors
            yield
        finally:
            for branch, _ in self._copies:
                branch.rounded = {}
            for group, _ in groups:
                group.factors = None

    def leaves(self) -> list[torch.Tensor]:
        """Factors of several layers by rows, which are no parameters and have gradients."""
        stacks = [each.factors for each in self._groups or () if each.factors is not None]
        return [leaf for factors in stacks for leaf in (factors.down, factors.up)]

    def _of_branch(self, branch: Branch) -> dict[str, Rounded]:
        return {
            role: Rounded(self._values[self._flat.segments[name].place].view(factor.shape), self._grads[name])
            for role, factor in branch.roles().items()
            if (name := self._names.get(id(factor))) is not None
        }

    def _of_group(self, group: Siblings) -> SiblingFactors | None:
        if group.dtype != self._dtype or (loras := group.loras()) is None:
            return None
        branches, scale = loras
        downs, ups = ([self._names.get(id(getattr(branch, role))) for branch in branches] for role in ("down", "up"))
        down, up = self._stack(downs), self._stack(ups)
        return None if down is None or up is None else SiblingFactors(down[0], up[0], scale, down[1], up[1])

    def _stack(self, names: Sequence[str | None]) -> tuple[torch.Tensor, Rounded] | None:
        """Trained factors by rows, as one tensor that has a gradient, and its copy; None unless they lie side by side."""
        segments = [self._flat.segments[name] for name in names if name is not None]
        shapes = {segment.shape for segment in segments}
        if len(segments) != len(names) or len(shapes) != 1 or len(segments[0].shape) != 2:
            return None
        if any(one.place.stop != two.place.start for one, two in pairwise(segments)):
            return None
        place = slice(segments[0].place.start, segments[-1].place.stop)
        rows, columns = segments[0].shape
        values, grads, copy = (
            buffer[place].view(rows * len(segments), columns)
            for buffer in (self._flat.values, self._flat.grads, self._values)
        )
        leaf = values.detach().requires_grad_()
        leaf.grad = grads
        return leaf, Rounded(copy, grads.data)


class _Group:
    """Layers of one input, and their factors by rows: None where each layer computes for itself."""

    def __init__(self, siblings: Siblings) -> None:
        self.siblings = siblings
        self.factors: SiblingFactors | None = None
        self._acting: list[object] = []

    def is_new(self) -> bool:
        """Whether other adapters act on a layer than when it was last asked, or at other strengths."""
        before, self._acting = self._acting, [layer.acting for layer in self.siblings.layers]
        return len(before) != len(self._acting) or any(map(is_not, before, self._acting))


def sibling_groups(network: nn.Module) -> list[Siblings]:
    """What `inweave.models.siblings.stack_siblings` has put there."""
    return [group for module in network.modules() for group in module.__dict__.get("siblings", {}).values()]
