"""The order in which a network sees latents, as a rearrangement of axes.

    latents (channels, rows * p, columns * q)  ──split──► c h p w q ──permute──► ──join neighbors──► the network's axes

    "c h w -> (c) (h) (w)"          unchanged             "c (h p) (w q) -> (h w) (c p q)"    FLUX.1's patches

`find` looks for the one that explains how known numbers lie: among all orders of the five axes, for patches of 1, 2, 4
and 8. Axes of length 1 (frames) may be anywhere between the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

AXES = "chpwq"
PATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Layout:
    """``order``: the axes of `AXES` as the network has them; ``groups``: how many of them each of its axes joins."""

    patch: int
    order: tuple[int, ...]
    groups: tuple[int, ...]

    def __str__(self) -> str:
        names = [AXES[axis] for axis in self.order]
        if self.patch == 1:
            names = [name if name not in "pq" else "" for name in names]
        parts, start = [], 0
        for count in self.groups:
            inside = [name for name in names[start : start + count] if name]
            parts.append(inside[0] if len(inside) == 1 else f"({' '.join(inside)})" if inside else "1")
            start += count
        source = "c h w" if self.patch == 1 else f"c (h p) (w q), p = q = {self.patch}"
        return f"{source} -> {' '.join(parts)}"

    def pack(self, latents: Tensor) -> Tensor:
        """Return latents (batch, channels, height, width) in the network's order."""
        batch, p = len(latents), self.patch
        _, channels, height, width = latents.shape
        split = latents.reshape(batch, channels, height // p, p, width // p, p)
        moved = split.permute(0, *(axis + 1 for axis in self.order))
        return moved.reshape(batch, *self.shape_of((channels, height, width)))

    def unpack(self, packed: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Return what `pack` made of latents of this shape (channels, height, width)."""
        split = self._split(shape)
        moved = packed.reshape(len(packed), *(split[axis] for axis in self.order))
        inverse = sorted(range(len(AXES)), key=self.order.__getitem__)
        return moved.permute(0, *(axis + 1 for axis in inverse)).reshape(len(packed), *shape)

    def _split(self, shape: tuple[int, int, int]) -> tuple[int, ...]:
        channels, height, width = shape
        return channels, height // self.patch, self.patch, width // self.patch, self.patch

    def shape_of(self, shape: tuple[int, int, int]) -> list[int]:
        """Return the network's axes for latents of this shape."""
        split, sizes, start = self._split(shape), [], 0
        for count in self.groups:
            size = 1
            for axis in self.order[start : start + count]:
                size *= split[axis]
            sizes.append(size)
            start += count
        return sizes


def find(latents: Tensor, packed: Tensor) -> Layout | None:
    """Return the layout in which ``packed`` (1, ...) holds ``latents`` (c, h, w), up to a positive factor."""
    flat = packed.flatten()
    if flat.numel() != latents.numel():
        return None
    c, h, w = latents.shape
    for layout in layouts((c, h, w), tuple(packed.shape[1:])):
        own = layout.pack(latents[None]).flatten()
        if _are_proportional(own[:64], flat[:64]) and _are_proportional(own, flat):
            return layout
    return None


def layouts(shape: tuple[int, int, int], packed: tuple[int, ...]) -> Iterator[Layout]:
    """Yield every layout that gives latents of ``shape`` the packed axes."""
    channels, height, width = shape
    for patch in PATCHES:
        if height % patch or width % patch:
            continue
        sizes = (channels, height // patch, patch, width // patch, patch)
        for order in permutations(range(len(AXES))):
            groups = _groups([sizes[axis] for axis in order], packed)
            if groups is not None:
                yield Layout(patch, order, groups)


def _groups(sizes: list[int], packed: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return how many of the axes in order make up each packed axis."""
    groups, position = [], 0
    for place, length in enumerate(packed):
        product, count = 1, 0
        while product < length and position < len(sizes):
            product *= sizes[position]
            position, count = position + 1, count + 1
        if place == len(packed) - 1:
            while position < len(sizes) and sizes[position] == 1:
                position, count = position + 1, count + 1
        if product != length:
            return None
        groups.append(count)
    return tuple(groups) if position == len(sizes) else None


def order_of(values: Tensor, packed: Tensor) -> Tensor | None:
    """Return the index of each packed value among distinct values, up to a positive factor; None: it has none."""
    flat, other = values.flatten(), packed.flatten()
    if flat.numel() != other.numel():
        return None
    index = torch.empty(flat.numel(), dtype=torch.long)
    index[other.argsort()] = flat.argsort()
    return index if _are_proportional(flat[index], other) else None


def _are_proportional(values: Tensor, others: Tensor) -> bool:
    """Return whether ``others`` are ``values`` times a positive factor."""
    source, target = values.double(), others.double()
    factor = float((target * source).sum() / (source * source).sum())
    return factor > 0 and torch.allclose(target, source * factor, rtol=1e-5, atol=1e-6 * float(target.abs().max()))
