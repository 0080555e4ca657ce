"""A stack of adapters and how strongly each part of each one is applied.

    strength of a placement = overall * component ("unet", "te", "te1", ...) * block

Any finite number is a strength: negative ones and those above one are common. `blocks` says how blocks are named.

A stack is a set: its items are sorted by their contents (`canonical`), so that every order gives the same sums, bit
for bit.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from inweave.adapter import Adapter
from inweave.adapter.components import COMPONENTS, FOLDERS
from inweave.adapter.strength_spec import finite_strength, parse_strength_spec
from inweave.errors import ConfigError
from inweave.targets.plan import Placement, Plan
from inweave.weights.blocks import block_list, nested_blocks

#: an adapter in any form: read, resolved, or a path
AdapterLike = Adapter | Plan | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Strength:
    """The strength of an adapter: overall, by component and by block."""

    overall: float = 1.0
    components: Mapping[str, float] = field(default_factory=dict)
    blocks: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(value: float | Mapping[str, Any] | Strength) -> Strength:
        """Make a strength from a number, {"unet": .., "te": ..} or diffusers' nested form (`blocks`)."""
        if isinstance(value, Strength):
            made = value
        elif isinstance(value, Mapping):
            made = _from_mapping(value)
        else:
            made = Strength(value)
        components = {name: finite_strength(number) for name, number in _pairs(made.components, "components")}
        blocks = {name: finite_strength(number) for name, number in _pairs(made.blocks, "blocks")}
        made = Strength(finite_strength(made.overall), components, blocks)
        unknown = [name for name in made.components if name not in COMPONENTS]
        if unknown:
            raise ConfigError(f"unknown component {str(unknown[0])[:80]!r}; use one of {', '.join(COMPONENTS)}")
        return made

    @staticmethod
    def block_list(values: Sequence[float]) -> dict[str, float]:
        """Return the ``blocks`` of a strength from a plain list of block weights, as front ends write them (12,
        17, 20 or 26).
        """
        return block_list(values)

    def at(self, placement: Placement, blocks: Mapping[str, str]) -> float:
        """Return the strength of one placement; ``blocks`` maps (component, tensor) names to block names."""
        value = self.in_component(placement.component)
        if self.blocks:
            value *= self._block(placement, blocks)
        if not math.isfinite(value):
            raise ConfigError(
                f"{placement.tensor}: its strengths multiply to {value}; a strength must be a finite number"
            )
        return value

    def in_component(self, component: str) -> float:
        """Return the strength of all placements in a component, without those of blocks."""
        return self.overall * self.components.get(component, self._group(component))

    def _group(self, component: str) -> float:
        """Return the strength of all text encoders, or of both denoisers."""
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


def _from_mapping(value: Mapping[str, Any]) -> Strength:
    """Return the strength of {component or diffusers' folder: number, or one for each block}, or of blocks alone."""
    if value and all(key in ("down", "mid", "up") for key in value):
        value = {"unet": value}
    parts = {key if key in COMPONENTS else FOLDERS.get(key, key): number for key, number in value.items()}
    blocks = next((number for key, number in parts.items() if key == "unet" and isinstance(number, Mapping)), None)
    if blocks is None:
        return Strength(components=parts)
    return Strength(components={**parts, "unet": 1.0}, blocks=cast("dict[str, float]", nested_blocks(blocks)))


#: one adapter of a stack: with its strength, or alone; alone, text is NAME[:STRENGTH]
StackItem = tuple[AdapterLike, float | Mapping[str, Any] | Strength]
StackEntry = AdapterLike | StackItem


def read_stack(stack: AdapterLike | Iterable[StackEntry]) -> list[tuple[AdapterLike, Strength]]:
    """Adapters and their strengths; one adapter by itself is a stack of one."""
    if isinstance(stack, str | os.PathLike | Adapter | Plan):
        return [read_entry(stack)]
    if not isinstance(stack, Iterable):
        raise ConfigError(f"a stack is a list of (adapter, strength) pairs, got {type(stack).__name__}")
    return [read_entry(entry) for entry in stack]


def read_entry(entry: StackEntry) -> tuple[AdapterLike, Strength]:
    """Return an adapter and its strength from a pair, an adapter (strength 1), or text as `strength_spec`
    defines it.
    """
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


@dataclass(frozen=True, slots=True)
class Item:
    """One placement with the strength it is applied at."""

    placement: Placement
    strength: float


TensorKey = tuple[str, str]  #: component, tensor name


def items_by_tensor(
    stack: Iterable[tuple[Plan, Strength]],
    blocks: Mapping[str, str],
    key_of: Callable[[Placement], TensorKey] = lambda placement: (placement.component, placement.tensor),
) -> dict[TensorKey, list[Item]]:
    """Map (component, tensor) to what it receives, in stack order; strength zero is left out and costs nothing."""
    items: dict[TensorKey, list[Item]] = {}
    for plan, strength in stack:
        for placement in plan.placements:
            value = strength.at(placement, blocks)
            if value != 0.0:
                items.setdefault(key_of(placement), []).append(Item(placement, value))
    return items


T = TypeVar("T")


def canonical(
    stack: Sequence[T], of: Callable[[T], tuple[Plan, Strength]], mark_of: Callable[[T], str] | None = None
) -> list[T]:
    """Return the items of a stack in the one order that their contents decide, however they were given.

    A few bytes usually distinguish adapters; all bytes are read only if those are equal. ``mark_of``: returns the
    `fingerprint` of an item that it remembers.
    """
    if len(stack) < 2:
        return list(stack)
    pairs = [of(item) for item in stack]
    marks = [mark_of(item) for item in stack] if mark_of else [fingerprint(plan) for plan, _ in pairs]
    alike = {mark for mark, count in Counter(marks).items() if count > 1}
    keys = []
    for mark, (plan, strength) in zip(marks, pairs, strict=True):
        rest = fingerprint(plan, whole=True) if mark in alike else ""
        keys.append(
            (mark, rest, strength.overall, sorted(strength.components.items()), sorted(strength.blocks.items()))
        )
    return [stack[number] for number in sorted(range(len(stack)), key=keys.__getitem__)]


def fingerprint(plan: Plan, *, whole: bool = False) -> str:
    """Return a digest of an adapter's contents: all of them, or the first bytes of some of its tensors."""
    digest = hashlib.blake2b(digest_size=16)
    names = sorted(plan.adapter.tensors)
    for name in names if whole else names[:: max(1, len(names) // 16)]:
        tensor = plan.adapter.tensors[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape} ".encode(errors="surrogatepass"))
        digest.update(tensor.data if whole else memoryview(tensor.data)[:64])
    if whole or not names:  # a plan made by hand, or one of several from one file
        for placement in plan.placements:
            digest.update(repr((placement.tensor, placement.target, placement.source, placement.factors)).encode())
            for tensor in placement.factors.tensors().values():
                digest.update(tensor.data)
    return digest.hexdigest()


def _pairs(value: object, name: str) -> Iterable[tuple[str, float]]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"strength {name}: expected a mapping of names to numbers, got {repr(value)[:80]}")
    return value.items()
