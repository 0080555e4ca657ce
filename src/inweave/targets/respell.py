"""Convert an adapter to the other naming: fused modules are cut apart, or parts joined, and renamed.

Every entry is first located in the model; its new name is that of the parts (diffusers naming) or of the tensor that
contains them (original naming). The model's weights are not needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from inweave.adapter import Adapter, Blocks, Entry, Factors, Ref, join
from inweave.targets.converter_order import name_layers
from inweave.targets.fit import fitted, misfit, stacked_shape, uses_of, widened
from inweave.targets.index import Component, ModelIndex, Use, module_of
from inweave.targets.links import Naming, Shape
from inweave.targets.locate import Locator, is_saved_module
from inweave.targets.plan import Finding

#: metadata that allows cutting a joined file exactly as it was
BLOCKS = "inweave.blocks"


@dataclass(slots=True)
class Respelling:
    """The renamed entries. ``lost``: entries that cannot be renamed; ``duplicates``: entries for rows that a finer
    entry of the file already covers.
    """

    entries: list[Entry] = field(default_factory=list)
    lost: list[Finding] = field(default_factory=list)
    duplicates: list[Finding] = field(default_factory=list)
    blocks: dict[str, Blocks] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Located:
    """An entry, the parts of the model it changes, and its factors adjusted to their shapes."""

    entry: Entry
    component: Component
    uses: tuple[Use, ...]
    factors: Factors
    original: bool  # has the original model's naming

    def coarseness(self) -> tuple[int, bool, tuple[str, ...]]:
        """Return the sort key of entries for the same rows: the smallest one stays, as in `resolve`."""
        rows = sum((self.component.parts.get(use.part) or (1,))[0] for use in self.uses)
        return rows, self.original, self.entry.keys


@dataclass(slots=True)
class _Item:
    """The factors of one part, in the part's row order."""

    entry: Entry
    factors: Factors


def respell(adapter: Adapter, index: ModelIndex, naming_of: Callable[[Component], Naming]) -> Respelling:
    """Rename every entry to the naming that ``naming_of`` returns for its component; names become dotted."""
    result = Respelling()
    adapter = name_layers(adapter, index)
    locator = Locator(adapter, index)
    recorded = _recorded(adapter.metadata)
    parts: dict[tuple[str, str], _Item] = {}
    whole: list[Entry] = []
    every: list[_Located] = []
    for entry in adapter.entries:
        if entry.param.endswith("?"):
            continue  # readers create it again from the weight's entry
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
        _join_all(items, component, naming_of(component), result)
    order = {key: number for number, key in enumerate(adapter.tensors)}
    result.entries.sort(key=lambda entry: order.get(entry.keys[0], 0))
    return result


def _without_duplicates(every: list[_Located], result: Respelling) -> list[_Located]:
    """Drop entries whose parts another entry covers: a file may hold the same module under two names."""
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
        return misfit(entry.factors, shape)
    return _Located(entry, match.component, uses, _with_axes(factors, shape), original)


def _with_axes(factors: Factors, shape: Shape) -> Factors:
    """Return factors whose magnitude has as many axes as the weight, if they store its kernel in their columns."""
    magnitude = factors.magnitude
    if magnitude is None or not factors.kernel_in_columns or len(shape) < 3:
        return factors
    size = magnitude.tensor.numel
    axes = (size, 1) if magnitude.axis == "out" else (1, size)
    tensor = magnitude.tensor.reshaped(axes + (1,) * (len(shape) - 2))
    return replace(factors, magnitude=replace(magnitude, tensor=tensor))


def _unsplit(
    entry: Entry, factors: Factors, component: Component, uses: tuple[Use, ...], naming: Naming
) -> Entry | None:
    """Return the entry under its new name if its rows are exactly those of the module in that naming."""
    tiles = _tiles(component, uses[0].part, naming)
    if factors.numbers_parts and len(uses) == 1 and len(tiles) > 1:
        number = next(i for i, tile in enumerate(tiles) if tile.part == uses[0].part)
        return replace(entry, ref=Ref(component.name, module_of(tiles[0].tensor)[0], part=number))
    if [(use.part, use.swap, use.transpose) for use in uses] != [(t.part, t.swap, t.transpose) for t in tiles]:
        return None
    if tiles[0].reshaped and naming == "original" and not factors.whole:
        return None
    module, param = _name(tiles[0], naming)
    part = entry.ref.part if factors.numbers_parts and naming == "original" else None
    shaped = factors.reshaped(tiles[0].shape) if tiles[0].reshaped else factors
    return replace(entry, ref=Ref(component.name, module, part=part), param=param, factors=shaped)


@dataclass(frozen=True, slots=True)
class _Tile:
    """One part as some rows of a tensor in the target naming."""

    part: str
    tensor: str
    shape: Shape
    swap: bool = False
    transpose: bool = False
    reshaped: bool = False  # the other naming stores the same values in another shape

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


def _tiles(component: Component, part: str, naming: Naming) -> list[_Tile]:
    """Return all parts of the tensor that contains ``part``, in row order."""
    by_part = component.link_of
    if part not in by_part:  # a bias that the base does not have: use the weight's layout, renamed
        weight = part.removesuffix("bias") + "weight"
        return [
            replace(tile, part=_as_bias(tile.part), tensor=_as_bias(tile.tensor), shape=tile.shape[:1])
            for tile in _tiles(component, weight, naming)
        ]
    link = by_part[part]
    if naming == "diffusers":
        tiles = component.divided.get(link.tensor, (link,))
        return [_Tile(each.part, each.diffusers, each.shape, reshaped=each.flat) for each in tiles]
    if link.flat:
        return [_Tile(part, link.original, (math.prod(link.shape),), reshaped=True)]
    return [
        _Tile(each.part, each.original, each.shape, each.swap, each.transpose)
        for each in component.tiles[link.original]
    ]


def _as_bias(tensor: str) -> str:
    return tensor.removesuffix("weight") + "bias"


def _name(tile: _Tile, naming: Naming) -> tuple[str, str]:
    """Return (module, param) of the tensor; diffusers calls a norm's scale its weight."""
    module, param = module_of(tile.tensor)
    return module, "weight" if naming == "diffusers" and param == "scale" else param


def _to_parts(
    entry: Entry,
    component: Component,
    uses: tuple[Use, ...],
    recorded: Mapping[str, Blocks],
    parts: dict[tuple[str, str], _Item],
) -> str:
    """Cut an entry into parts; return the reason if that is impossible."""
    if any(use.transpose for use in uses):
        return "the other naming stores this weight transposed, and its factors cannot be transposed"
    pieces: list[Factors | None] = [entry.factors]
    if len(uses) > 1:
        if not entry.factors.rows_are_local():
            return "its rows depend on each other and cannot be cut apart"
        sizes = [_rows(component, use.part) for use in uses]
        fused = component.fused.get(tuple(use.part for use in uses), "")
        parts_of = entry.factors.cut(sizes, recorded.get(f"{component.name}:{fused}"))
        if parts_of is None:
            return "its factors cannot be cut exactly at the boundaries of the other naming"
        pieces = parts_of
    for use, piece in zip(uses, pieces, strict=True):
        if piece is None:
            continue
        turned = piece.swapped() if use.swap else piece
        if turned is None:
            return "the other naming exchanges halves of its rows, and its factors cannot be reordered"
        parts[component.name, use.part] = _Item(entry, turned)
    return ""


def _rows(component: Component, part: str) -> int:
    return next(tile.rows for tile in _tiles(component, part, "original") if tile.part == part)


def _join_all(items: Mapping[str, _Item], component: Component, naming: Naming, result: Respelling) -> None:
    done: set[str] = set()
    for part, item in items.items():
        tiles = _tiles(component, part, naming)
        original = tiles[0].tensor
        if original in done:
            continue
        done.add(original)
        there = [items.get(tile.part) for tile in tiles]
        keys = tuple(dict.fromkeys(key for item in there if item for key in item.entry.keys))
        module, param = _name(tiles[0], naming)
        factors: Factors | None = item.factors
        if len(tiles) > 1:
            joined = join([item.factors if item else None for item in there], [tile.rows for tile in tiles])
            factors = joined[0] if joined else None
            if joined:
                result.blocks[f"{component.name}:{original}"] = joined[1]
        elif tiles[0].transpose:
            factors = None
        elif tiles[0].swap:
            factors = item.factors.swapped()
        elif tiles[0].reshaped and naming == "original":
            factors = None
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
    """Return the record of joined modules for the file's metadata; empty if none was joined."""
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
