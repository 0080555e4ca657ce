"""Blocks of a denoiser: the names that strengths may give weights of their own.

    BASE IN00..IN11 MID OUT00..OUT11     blocks of a UNet as front ends name them; a list of 12, 17, 20 or 26 numbers
                                         is read in the usual order
    transformer_blocks.3                 any prefix of a module's name, for everything else
    {"down": 0.9, "mid": 1, "up": {"block_0": 0.6, "block_1": [0.4, 0.8, 1]}}     as diffusers writes them for a UNet:
                                         a number for all of a part or block, a list for its attentions one by one
                                         (with the resnets beside them)

A name that a model does not have is an error: its weight would be ignored, and the adapter applied at full strength.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from inweave.errors import ConfigError
from inweave.targets.index import ModelIndex

#: which blocks a plain list of numbers names, by its length
_LISTS: dict[int, tuple[str, ...]] = {
    12: ("BASE", "IN04", "IN05", "IN07", "IN08", "MID", *(f"OUT{i:02d}" for i in range(6))),
    17: ("BASE", "IN01", "IN02", "IN04", "IN05", "IN07", "IN08", "MID", *(f"OUT{i:02d}" for i in range(3, 12))),
    20: ("BASE", *(f"IN{i:02d}" for i in range(9)), "MID", *(f"OUT{i:02d}" for i in range(9))),
    26: ("BASE", *(f"IN{i:02d}" for i in range(12)), "MID", *(f"OUT{i:02d}" for i in range(12))),
}
_BLOCK = re.compile(r"(input_blocks|output_blocks)\.(\d+)\.|middle_block\.")
_SHOWN = 5


def block_list(values: Sequence[float]) -> dict[str, float]:
    """Block weights from a plain list of numbers, as front ends write them (12, 17, 20 or 26)."""
    if len(values) not in _LISTS:
        raise ConfigError(f"{len(values)} block weights; expected 12, 17, 20 or 26")
    return dict(zip(_LISTS[len(values)], values, strict=True))


def nested_blocks(nested: Mapping[str, object]) -> dict[str, object]:
    """Return the blocks that diffusers' nested form names; "NAME#3" demands that the block has three attentions."""
    blocks: dict[str, object] = {}
    for side, value in nested.items():
        if side == "mid":
            blocks["mid_block"] = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        elif side in ("down", "up") and isinstance(value, Mapping):
            for block, numbers in value.items():
                number = re.fullmatch(r"block_(\d+)", str(block))
                if number is None:
                    raise ConfigError(f"strength of {side!r}: expected names like 'block_1', got {str(block)[:80]!r}")
                blocks |= _attentions(f"{side}_blocks.{number[1]}", numbers)
        elif side in ("down", "up"):
            blocks[f"{side}_blocks"] = value
        else:
            raise ConfigError(f"strength of blocks: expected 'down', 'mid' and 'up', got {str(side)[:80]!r}")
    return blocks


def _attentions(block: str, numbers: object) -> dict[str, object]:
    if not isinstance(numbers, list | tuple):
        return {block: numbers}
    if len(numbers) == 1:
        return {block: numbers[0]}
    parts = {f"{block}.{kind}.{i}": number for i, number in enumerate(numbers) for kind in ("attentions", "resnets")}
    return parts | {f"{block}#{len(numbers)}": 1.0}


def block_names(index: ModelIndex) -> dict[str, str]:
    """Map each tensor of the denoiser to its block (IN04 ...), and "<tensor>#part" to its diffusers name."""
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


def refuse_unknown_blocks(names: Iterable[str], blocks: Mapping[str, str], index: ModelIndex | None) -> None:
    """Raise if a model has no block of one of these names. ``blocks``: what `block_names` says of it."""
    names = sorted(names, key=lambda name: "#" not in name)  # counts first: their error says more
    if not names or index is None:
        return
    known = {"BASE", *(name for tensor, name in blocks.items() if not tensor.endswith("#part"))}
    networks = [index.denoiser] if index.denoiser is not None else list(index)
    for network in networks:
        for part in network.parts:
            pieces = part.split(".")
            known.update(".".join(pieces[:count]) for count in range(1, len(pieces) + 1))
    for name in names:
        block, counted, count = str(name).partition("#")
        if counted:
            own = {each for each in known if re.fullmatch(rf"{re.escape(block)}\.attentions\.\d+", each)}
            if len(own) != int(count):
                raise ConfigError(
                    f"{count} strengths for {block}, which has {len(own)} attentions: give as many, or one"
                )
        if counted or name in known:
            continue
        close = difflib.get_close_matches(str(name)[:200], known, n=_SHOWN, cutoff=0.6)
        top = sorted(each for each in known if "." not in each)
        hint = f"did you mean {', '.join(close)}" if close else f"its blocks begin with {', '.join(top[: 4 * _SHOWN])}"
        raise ConfigError(f"this model has no block {str(name)[:80]!r}; {hint}")
