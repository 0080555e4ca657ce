"""The same adapter in the other naming: fused modules cut apart, or parts joined, and renamed.

Every entry is first located on the model; its new name is that of the parts (diffusers naming) or of the
tensor they lie in (original naming). Nothing needs the model's weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from inweave.adapter import Adapter, Entry, Factors, Oft, Ref
from inweave.targets.cut import Blocks, cut, join, swapped
from inweave.targets.fit import delta_shape, fitted, shape_text, stacked_shape, uses_of, widened
from inweave.targets.index import Component, ModelIndex, Use, module_of
from inweave.targets.links import Link, Naming
from inweave.targets.locate import Locator, is_saved_module
from inweave.targets.plan import Finding

#: metadata that lets a joined file be cut again exactly as it was
BLOCKS = "inweave.blocks"


@dataclass(slots=True)
class Respelling:
    """``lost``: what cannot be renamed; ``duplicates``: entries for rows that a finer entry of the file covers already."""

    entries: list[Entry] = field(default_factory=list)
    lost: list[Finding] = field(default_factory=list)
    duplicates: list[Finding] = field(default_factory=list)
    blocks: dict[str, Blocks] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Located:
    """An entry, the parts of the model it changes, and its factors as they fit there."""

    entry: Entry
    component: Component
    uses: tuple[Use, ...]
    factors: Factors
    original: bool  # named as in the original model

    def coarseness(self) -> tuple[int, bool, tuple[str, ...]]:
        """Of two entries for the same rows, the one with the smaller value stays, as in `resolve`."""
        rows = sum((self.component.parts.get(use.part) or (1,))[0] for use in self.uses)
        return rows, self.original, self.entry.keys


@dataclass(slots=True)
class _Item:
    """One part's factors, in that part's own row order."""

    entry: Entry
    factors: Factors


def respell(adapter: Adapter, index: ModelIndex, naming_of: Callable[[Component], Naming]) -> Respelling:
    """Rename every entry to the naming ``naming_of`` chooses for its component; names become dotted."""
    result = Respelling()
    locator = Locator(adapter, index)
    recorded = _recorded(adapter.metadata)
    parts: dict[tuple[str, str], _Item] = {}
    whole: list[Entry] = []
    every: list[_Located] = []
    for entry in adapter.entries:
        if entry.param.endswith("?"):
            continue  # made again by whoever reads the weight's entry
        located = _located(entry, locator)
        if isinstance(located, str) and is_saved_module(entry):
            whole.append(replace(entry, ref=replace(entry.ref, component=next(iter(index.components)))))
            continue
        if isinstance(located, str):
            result.lost.append(Finding(entry.keys, str(entry.ref), entry.ref.component, located))
            continue
        every.append(located)
    for each in _without_duplicates(every, result):
        entry, component = each.entry, each.component
        unsplit = _unsplit(entry, each.factors, component, each.uses, naming_of(component))
        if unsplit is not None:
            whole.append(unsplit)
            continue
        reason = _to_parts(replace(entry, factors=each.factors), component, each.uses, recorded, parts)
        if reason:
            result.lost.append(Finding(entry.keys, str(entry.ref), component.name, reason))
    result.entries += whole
    for component in index:
        items = {part: item for (name, part), item in parts.items() if name == component.name}
        if naming_of(component) == "diffusers":
            result.entries += [_under_part_name(item, component, part) for part, item in items.items()]
        else:
            _join_all(items, component, result)
    order = {key: number for number, key in enumerate(adapter.tensors)}
    result.entries.sort(key=lambda entry: order.get(entry.keys[0], 0))
    return result


def _without_duplicates(every: list[_Located], result: Respelling) -> list[_Located]:
    """Drop what lands on parts that another entry covers: a file may hold the same module under two names."""
    owners: dict[tuple[str, str], Entry] = {}
    dropped: set[int] = set()
    for number, each in sorted(enumerate(every), key=lambda pair: pair[1].coarseness()):
        parts = [(each.component.name, use.part) for use in each.uses]
        rival = next((owners[part] for part in parts if part in owners), None)
        if rival is None:
            owners.update(dict.fromkeys(parts, each.entry))
            continue
        dropped.add(number)
        reason = f"a duplicate: the same rows also receive {rival.keys[0]} ({rival.factors.algorithm}), which stays"
        result.duplicates.append(Finding(each.entry.keys, str(each.entry.ref), each.component.name, reason))
    return [each for number, each in enumerate(every) if number not in dropped]


def _located(entry: Entry, locator: Locator) -> _Located | str:
    if entry.ref.below:
        return "the file does not record which layer this is"
    match = locator.match(entry)
    if isinstance(match, str):
        return match
    original = match.naming == "original"
    uses = uses_of(match.spelling, entry.param)
    if uses is None and entry.param == "bias" and (weights := uses_of(match.spelling, "weight")):
        rows = stacked_shape(match.component, weights)[0]
        if math.prod(entry.factors.shape()) != rows:
            return f"a bias of {list(entry.factors.shape())} for {rows} outputs"
        uses = tuple(replace(use, part=use.part.removesuffix("weight") + "bias") for use in weights)
        return _Located(entry, match.component, uses, entry.factors, original)
    if uses is None:
        return f"the module has no {entry.param}"
    if entry.ref.part is not None:
        uses = uses[entry.ref.part : entry.ref.part + 1]
    if not uses:
        return f"the module has no part {entry.ref.part}"
    shape = stacked_shape(match.component, uses)
    factors = fitted(entry.factors, shape)
    if factors is None and (large := widened(entry.factors, shape, uses)):
        factors = replace(entry.factors, widen=large)
    if factors is None:
        return f"the base has {list(shape)} here, the adapter changes {shape_text(delta_shape(entry.factors))}"
    return _Located(entry, match.component, uses, factors, original)


def _unsplit(
    entry: Entry, factors: Factors, component: Component, uses: tuple[Use, ...], naming: Naming
) -> Entry | None:
    """The entry under its new name, where its rows are exactly those of the module in that naming."""
    if naming == "diffusers":
        if len(uses) > 1 or uses[0].swap or uses[0].transpose:
            return None
        module, param = module_of(uses[0].part)
        return replace(entry, ref=Ref(component.name, module), param=_param(param), factors=factors)
    tiles = _tiles(component, uses[0].part)
    if isinstance(factors, Oft) and len(uses) == 1 and len(tiles) > 1:
        number = next(i for i, link in enumerate(tiles) if link.part == uses[0].part)
        return replace(entry, ref=Ref(component.name, module_of(tiles[0].original)[0], part=number))
    if tuple(use.part for use in uses) != tuple(link.part for link in tiles):
        return None
    if any((use.swap, use.transpose) != (link.swap, link.transpose) for use, link in zip(uses, tiles, strict=True)):
        return None
    module, param = module_of(tiles[0].original)
    part = entry.ref.part if isinstance(factors, Oft) else None
    return replace(entry, ref=Ref(component.name, module, part=part), param=param, factors=factors)


def _param(param: str) -> str:
    return "weight" if param == "scale" else param


def _tiles(component: Component, part: str) -> list[Link]:
    """All links of the original tensor a part lies in, in row order."""
    by_part = component.link_of
    if part not in by_part:  # a bias the base does not have: the weight's layout, renamed
        weight = by_part[part.removesuffix("bias") + "weight"]
        return [
            replace(
                link,
                part=link.part.removesuffix("weight") + "bias",
                original=link.original.removesuffix("weight") + "bias",
                shape=link.shape[:1],
            )
            for link in component.tiles[weight.original]
        ]
    return component.tiles[by_part[part].original]


def _to_parts(
    entry: Entry,
    component: Component,
    uses: tuple[Use, ...],
    recorded: Mapping[str, Blocks],
    parts: dict[tuple[str, str], _Item],
) -> str:
    """Cut an entry into parts; the reason if it cannot be."""
    if any(use.transpose for use in uses):
        return "the other naming stores this weight transposed, and its factors cannot be"
    pieces: list[Factors | None] = [entry.factors]
    if len(uses) > 1:
        if not entry.factors.rows_are_local():
            return "its rows depend on each other and cannot be cut apart"
        sizes = [_tiles_size(component, use.part) for use in uses]
        parts_of = cut(entry.factors, sizes, recorded.get(f"{component.name}:{_original_name(component, uses)}"))
        if parts_of is None:
            return "its factors cannot be cut exactly at the borders of the other naming"
        pieces = parts_of
    for use, piece in zip(uses, pieces, strict=True):
        if piece is None:
            continue
        turned = swapped(piece) if use.swap else piece
        if turned is None:
            return "the other naming exchanges halves of its rows, and its factors cannot be reordered"
        parts[component.name, use.part] = _Item(entry, turned)
    return ""


def _tiles_size(component: Component, part: str) -> int:
    return next(link.rows for link in _tiles(component, part) if link.part == part)


def _original_name(component: Component, uses: tuple[Use, ...]) -> str:
    return _tiles(component, uses[0].part)[0].original


def _under_part_name(item: _Item, component: Component, part: str) -> Entry:
    module, param = module_of(part)
    return replace(item.entry, ref=Ref(component.name, module), param=_param(param), factors=item.factors)


def _join_all(items: Mapping[str, _Item], component: Component, result: Respelling) -> None:
    done: set[str] = set()
    for part, item in items.items():
        tiles = _tiles(component, part)
        original = tiles[0].original
        if original in done:
            continue
        done.add(original)
        there = [items.get(link.part) for link in tiles]
        keys = tuple(dict.fromkeys(key for item in there if item for key in item.entry.keys))
        module, param = module_of(original)
        factors: Factors | None = item.factors
        if len(tiles) > 1:
            joined = join([item.factors if item else None for item in there], [link.rows for link in tiles])
            factors = joined[0] if joined else None
            if joined:
                result.blocks[f"{component.name}:{original}"] = joined[1]
        elif tiles[0].transpose:
            factors = None
        elif tiles[0].swap:
            factors = swapped(item.factors)
        if factors is None:
            reason = (
                f"the parts of {original} cannot be joined exactly (different algorithms, scales or dtypes)"
                if len(tiles) > 1
                else f"{original} orders its rows differently, and {item.factors.kind} factors cannot be reordered"
            )
            result.lost.append(Finding(keys, module, component.name, reason))
            continue
        result.entries.append(
            replace(item.entry, ref=Ref(component.name, module), param=param, factors=factors, keys=keys)
        )


def blocks_metadata(blocks: Mapping[str, Blocks]) -> dict[str, str]:
    """The record of joined modules, for the file's metadata; empty if none was joined."""
    if not blocks:
        return {}
    rows = {name: [list(b.ranks), list(b.alphas), b.shared] for name, b in blocks.items()}
    return {BLOCKS: json.dumps(rows, separators=(",", ":"))}


def _recorded(metadata: Mapping[str, str]) -> dict[str, Blocks]:
    try:
        rows = json.loads(metadata.get(BLOCKS, "{}"))
        return {
            name: Blocks(tuple(ranks), tuple(alphas), bool(shared)) for name, (ranks, alphas, shared) in rows.items()
        }
    except (ValueError, TypeError, AttributeError):
        return {}
