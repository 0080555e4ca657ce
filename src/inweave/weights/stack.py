"""A stack of adapters and how strongly each part of each one is applied.

    strength of a placement = overall * component ("unet", "te", "te1", ...) * block

Any finite number is a strength: negative ones and those above one are common. Blocks are named as the field
names them, `BASE IN00..IN11 MID OUT00..OUT11` for UNets (a list of 12, 17, 20 or 26 numbers is read in the
usual order), or by a prefix of the module's name for everything else (`transformer_blocks.3`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from inweave.adapter import Adapter
from inweave.adapter.components import COMPONENTS
from inweave.adapter.strength_spec import parse_strength_spec
from inweave.errors import ConfigError
from inweave.targets.index import ModelIndex
from inweave.targets.plan import Placement, Plan

#: an adapter in any form: read, resolved, or a path
AdapterLike = Adapter | Plan | str | os.PathLike[str]

#: which blocks a plain list of numbers names, by its length
_LISTS: dict[int, tuple[str, ...]] = {
    12: ("BASE", "IN04", "IN05", "IN07", "IN08", "MID", *(f"OUT{i:02d}" for i in range(6))),
    17: ("BASE", "IN01", "IN02", "IN04", "IN05", "IN07", "IN08", "MID", *(f"OUT{i:02d}" for i in range(3, 12))),
    20: ("BASE", *(f"IN{i:02d}" for i in range(9)), "MID", *(f"OUT{i:02d}" for i in range(9))),
    26: ("BASE", *(f"IN{i:02d}" for i in range(12)), "MID", *(f"OUT{i:02d}" for i in range(12))),
}
_BLOCK = re.compile(r"(input_blocks|output_blocks)\.(\d+)\.|middle_block\.")


@dataclass(frozen=True, slots=True)
class Strength:
    """How strongly an adapter is applied, overall and by component and block."""

    overall: float = 1.0
    components: Mapping[str, float] = field(default_factory=dict)
    blocks: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(value: float | Mapping[str, float] | Strength) -> Strength:
        """A number, or {"unet": .., "te": ..}; checked to be finite."""
        try:
            if isinstance(value, Strength):
                made = value
            elif isinstance(value, Mapping):
                made = Strength(components=dict(value))
            else:
                made = Strength(float(value))
            finite = all(map(math.isfinite, (made.overall, *made.components.values(), *made.blocks.values())))
        except (TypeError, ValueError):
            finite = False
        if not finite:
            raise ConfigError(f"a strength must be a finite number, got {value!r}")
        unknown = [name for name in made.components if name not in COMPONENTS]
        if unknown:
            raise ConfigError(f"no component is called {unknown[0]!r}; known are {', '.join(COMPONENTS)}")
        return made

    @staticmethod
    def block_list(values: Sequence[float]) -> dict[str, float]:
        """``blocks`` of a strength from a plain list of block weights, as front ends write them (12, 17, 20 or 26)."""
        if len(values) not in _LISTS:
            raise ConfigError(f"{len(values)} block weights; expected 12, 17, 20 or 26")
        return dict(zip(_LISTS[len(values)], values, strict=True))

    def at(self, placement: Placement, blocks: Mapping[str, str]) -> float:
        """The strength of one placement; ``blocks`` maps (component, tensor) names to block names."""
        component = placement.component
        value = self.overall * self.components.get(component, self._group(component))
        if self.blocks:
            value *= self._block(placement, blocks)
        return value

    def _group(self, component: str) -> float:
        """The strength of all text encoders, or of both denoisers."""
        return self.components.get("te" if component.startswith("te") else "unet" if component == "unet2" else "", 1.0)

    def _block(self, placement: Placement, blocks: Mapping[str, str]) -> float:
        if placement.component.startswith("te"):
            return self.blocks.get("BASE", 1.0)
        name = blocks.get(placement.tensor, "")
        if name in self.blocks:
            return self.blocks[name]
        part = blocks.get(f"{placement.tensor}#part", placement.tensor)
        matches = [key for key in self.blocks if part == key or part.startswith(f"{key}.")]
        return self.blocks[max(matches, key=len)] if matches else 1.0


#: one adapter of a stack: with its strength, or alone; alone, text is NAME[:STRENGTH]
StackEntry = AdapterLike | tuple[AdapterLike, float | Mapping[str, float] | Strength]


def read_stack(stack: AdapterLike | Iterable[StackEntry]) -> list[tuple[AdapterLike, Strength]]:
    """Adapters and their strengths; one adapter by itself is a stack of one."""
    if isinstance(stack, str | os.PathLike | Adapter | Plan):
        return [read_entry(stack)]
    if not isinstance(stack, Iterable):
        raise ConfigError(f"a stack is a list of (adapter, strength) pairs, got {type(stack).__name__}")
    return [read_entry(entry) for entry in stack]


def read_entry(entry: StackEntry) -> tuple[AdapterLike, Strength]:
    """An adapter and its strength: a pair, an adapter at strength 1, or text as `strength_spec` defines it."""
    if isinstance(entry, tuple):
        if len(entry) != 2:
            raise ConfigError(f"a stack holds (adapter, strength) pairs, got {len(entry)} values: {entry!r}")
        return _adapter_like(entry[0]), Strength.of(entry[1])
    if isinstance(entry, str):
        spec = parse_strength_spec(entry, exists=os.path.exists)
        return spec.name, Strength.of(spec.strength)
    return _adapter_like(entry), Strength()


def _adapter_like(adapter: AdapterLike) -> AdapterLike:
    if not isinstance(adapter, Adapter | Plan | str | os.PathLike):
        raise ConfigError(f"expected an adapter: a path, an Adapter or a Plan, got {type(adapter).__name__}")
    return adapter


def block_names(index: ModelIndex) -> dict[str, str]:
    """For each tensor of the denoiser: its block name (IN04 ...), and under "<tensor>#part" its diffusers name."""
    component = index.denoiser
    if component is None:
        return {}
    names: dict[str, str] = {}
    for link in component.links:
        home = component.homes.get(link.part)
        if home is None:
            continue
        names.setdefault(f"{home.tensor}#part", link.part)
        if match := _BLOCK.match(link.original):
            side = {"input_blocks": "IN", "output_blocks": "OUT", None: "MID"}[match[1]]
            names[home.tensor] = f"{side}{int(match[2]):02d}" if match[2] else side
        else:
            names[home.tensor] = "BASE"
    return names


@dataclass(frozen=True, slots=True)
class Item:
    """One placement with the strength it is applied at."""

    placement: Placement
    strength: float


def items_by_tensor(
    stack: Iterable[tuple[Plan, Strength]], blocks: Mapping[str, str]
) -> dict[tuple[str, str], list[Item]]:
    """(component, tensor) -> what it receives, in stack order; strength zero is left out and costs nothing."""
    items: dict[tuple[str, str], list[Item]] = {}
    for plan, strength in stack:
        for placement in plan.placements:
            value = strength.at(placement, blocks)
            if value != 0.0:
                items.setdefault((placement.component, placement.tensor), []).append(Item(placement, value))
    return items
