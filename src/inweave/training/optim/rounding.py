"""Factors in the dtype of the model, for one micro-batch: one kernel rounds all of them, and layers read the copies.

    each layer        `Branch.rounded`: copies of its factors, and the buffers of their gradients
    several layers    `Siblings.factors`: the same for layers of one input, whose factors are adjacent in memory

Layers that read one tensor in many places (`SharedSiblings`) compute before all blocks; not if blocks are recomputed in
the backward pass, when their outputs are gone, or compiled, since they would be compiled for each place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """The copies of one run's factors, which are made whenever `active` is entered."""

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
        self._groups: list[_SiblingGroup] | None = None

    @contextmanager
    def active(self, *, shared: bool) -> Iterator[None]:
        """Let layers compute with the copies inside the block. ``shared``: some also for many places at once.

        Gradients of the factors are added to the flat gradients; the parameters must not change inside.
        """
        self._flat.rounded(self._dtype)
        if self._groups is None:  # not earlier: blocks are fused after the step is made
            siblings = [each for network in self._networks.values() for each in sibling_groups(network)]
            self._groups = [_SiblingGroup(each, self._of_group) for each in siblings]
        for each in self._groups:
            each.renew()
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
        """Return the stacked factors of several layers, which are not parameters but have gradients."""
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
        """Return trained factors stacked by rows as one leaf tensor, and its copy; None unless they are adjacent."""
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


class _SiblingGroup:
    """Layers of one input, and their stacked ``factors`` from ``make``: None if each layer computes separately."""

    def __init__(self, siblings: Siblings, make: Callable[[Siblings], SiblingFactors | None]) -> None:
        self.siblings = siblings
        self.factors: SiblingFactors | None = None
        self._make = make
        self._acting: list[object] = []

    def renew(self) -> None:
        """Make the factors again if other adapters act on a layer than before, or at other strengths."""
        before, self._acting = self._acting, [layer.acting for layer in self.siblings.layers]
        if len(before) != len(self._acting) or any(map(is_not, before, self._acting)):
            self.factors = self._make(self.siblings)


def sibling_groups(network: nn.Module) -> list[Siblings]:
    """Return the groups that `inweave.models.siblings.stack_siblings` made."""
    return [group for module in network.modules() for group in module.__dict__.get("siblings", {}).values()]
