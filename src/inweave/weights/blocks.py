"""Blocks of a denoiser: the names that strengths may give weights of their own.

    BASE IN00..IN11 MID OUT00..OUT11     blocks of a UNet as front ends name them; a list of 12, 17, 20 or 26 numbers
                                         is read in the usual order
    transformer_blocks.3                 any prefix of a module's name, for everything else

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
    names = list(names)
    if not names or index is None:
        return
    known = {"BASE", *(name for tensor, name in blocks.items() if not tensor.endswith("#part"))}
    networks = [index.denoiser] if index.denoiser is not None else list(index)
    for network in networks:
        for part in network.parts:
            pieces = part.split(".")
            known.update(".".join(pieces[:count]) for count in range(1, len(pieces) + 1))
    for name in names:
        if name in known:
            continue
        close = difflib.get_close_matches(str(name)[:200], known, n=_SHOWN, cutoff=0.6)
        top = sorted(each for each in known if "." not in each)
        hint = f"did you mean {', '.join(close)}" if close else f"its blocks begin with {', '.join(top[: 4 * _SHOWN])}"
        raise ConfigError(f"this model has no block {str(name)[:80]!r}; {hint}")
