"""Adapters on weights that registered modules store as (in, out).

    files        always (out, in)                          resolved on the shapes (out, in)
    placements   the stored shape (in, out), and factors marked as transposed

A square weight would fit either way: only the module's kind (`inweave.ops.kinds`) knows how it is stored. PEFT decides
by the module's class too, and writes one fan_in_fan_out for all of them; `known_layouts` has each module's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from inweave.adapter import Adapter
from inweave.ops.kinds import kind_of, stored_transposed
from inweave.ops.kinds.wrappers import named_modules
from inweave.targets.index import ModelIndex, component_from_names
from inweave.targets.plan import Placement, Plan
from inweave.targets.resolve import resolve


def known_layouts(network: nn.Module) -> dict[str, bool]:
    """Return {weight: whether it is stored as (in, out)} of the modules whose class tells."""
    kinds = ((path, kind_of(module)) for path, module in named_modules(network))
    return {
        f"{path}.weight".lstrip("."): kind.transposed for path, kind in kinds if kind is not None and not kind.embedding
    }


class Orientation:
    """The weights of some networks that are stored as (in, out); ``index`` has the stored shapes."""

    def __init__(self, networks: Mapping[str, nn.Module], index: ModelIndex) -> None:
        self._index = index
        self._transposed: set[tuple[str, str]] = set()
        for name, network in networks.items():
            shapes = dict(index.components[name].shapes)
            modules = named_modules(network)
            names = [f"{path}.weight".lstrip(".") for path, module in modules if stored_transposed(module)]
            if transposed := [tensor for tensor in names if tensor in shapes]:
                self._transposed |= {(name, tensor) for tensor in transposed}
                logical = component_from_names(name, shapes | {tensor: shapes[tensor][::-1] for tensor in transposed})
                layouts = {**index.components[name].layouts, **dict.fromkeys(transposed, False)}
                logical = replace(logical, layouts=layouts)
                self._index = replace(self._index, components={**self._index.components, name: logical})

    def resolve(self, adapter: Adapter, *, strict: bool = True) -> Plan:
        """Place every tensor, with the shapes and the layout of the stored weights."""
        plan = resolve(adapter, self._index, strict=strict)
        if not self._transposed:
            return plan
        return replace(plan, placements=tuple(self._stored(placement) for placement in plan.placements))

    def _stored(self, placement: Placement) -> Placement:
        if (placement.component, placement.tensor) not in self._transposed:
            return placement
        factors = replace(placement.factors, transposed=True)
        return replace(placement, shape=placement.shape[::-1], factors=factors)
