"""Links between the tensors of a model in one naming and those in the other.

A *part* is a tensor of the finer naming (diffusers, transformers): fused tensors of an original
checkpoint consist of several. A `Link` gives the place of one part in the original:

    part  <->  rows [start : start+length] of `original`, halves swapped or transposed if marked

Where the original is the finer one, the part is some rows of a diffusers tensor: rows from `offset` on of `tensor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Shape = tuple[int, ...]
Naming = Literal["diffusers", "original"]


@dataclass(frozen=True, slots=True)
class Link:
    part: str
    shape: Shape
    original: str
    start: int = 0
    length: int | None = None  # None: the whole tensor
    swap: bool = False
    transpose: bool = False
    flat: bool = False  # the original holds the same values in one axis
    tensor: str = ""  # the diffusers tensor, if the part is only some of its rows
    offset: int = 0  # the first of these rows

    @property
    def diffusers(self) -> str:
        """The tensor of the diffusers naming this part lies in."""
        return self.tensor or self.part

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


class Table(Protocol):
    """A family's name table."""

    name: str

    @property
    def divides(self) -> bool:
        """Whether some diffusers tensors consist of several originals, so that parts are finer than both."""
        ...

    def links(self, shapes: Mapping[str, Shape], naming: Naming) -> list[Link]:
        """Return one link per part, for a model whose tensors (in ``naming``) are ``shapes``."""
        ...

    def coverage(self, names: Iterable[str]) -> dict[Naming, int]:
        """Return the number of names the table knows in each naming."""
        ...

    def aliases(self, links: list[Link]) -> dict[str, tuple[str, ...]]:
        """Further module spellings: alias -> the parts (module names) it stands for, in row order."""
        ...


class IdentityTable:
    """One naming everywhere: Qwen-Image, T5, CLIP in transformers' names, any other torch model."""

    name = "own"
    divides = False

    def links(self, shapes: Mapping[str, Shape], naming: Naming) -> list[Link]:
        return [Link(name, shape, name) for name, shape in shapes.items()]

    def coverage(self, names: Iterable[str]) -> dict[Naming, int]:
        return {"diffusers": 0, "original": 0}

    def aliases(self, links: list[Link]) -> dict[str, tuple[str, ...]]:
        return {}


def tiles_of(links: Iterable[Link]) -> dict[str, list[Link]]:
    """Map each original tensor to the parts that make it up, in row order."""
    tiles: dict[str, list[Link]] = {}
    for link in links:
        tiles.setdefault(link.original, []).append(link)
    for each in tiles.values():
        each.sort(key=lambda link: link.start)
    return tiles


def whole_shape(link: Link, divided: Mapping[str, list[Link]]) -> Shape:
    """Return the shape of the diffusers tensor that contains a part."""
    if not link.tensor:
        return link.shape
    return (sum(part.rows for part in divided[link.tensor]), *link.shape[1:])
