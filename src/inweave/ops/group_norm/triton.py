"""Group normalization as kernels: formulas of `reference`, sums in float32 in an order that depends on the shape alone.

Two launches in each direction over one grid: (blocks of whole groups, chunks of positions, batch)

    1   one chunk of one block:  channels are summed over its positions, groups over their channels -> partials
    2   the partials of its groups, of all chunks in order -> mean and rstd (or two averages) -> one chunk of the result

so a batch of one fills the device, and there is no third launch. Partials of the forward pass are (mean, sum of squared
deviations), combined by the formula of Chan, Golub and LeVeque; a channel's deviations are relative to the mean of its
first few positions, so that a mean far from zero costs no digits. Means are averaged as one of them (the pivot) plus
the average distance from it, and the pivot is selected, not summed: the compiler may compute a sum twice, in layouts
that add in another order, and the two results differ in their last bits.

A group is rarely a power of two wide (SDXL: 10 to 80). A block holds as many whole groups as fit 128 or 256 channels,
whichever wastes less; which channel belongs to which group is a comparison of numbers, not a reshape.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inweave.ops.common.exponential import exact_exp

_PROGRAMS = 528  # about four for each multiprocessor of an H200
_MOST_CHUNKS = 128
_ANY = ["positions", "groups", "chunk", "chunks"]  # one kernel for all resolutions


@triton.jit
def _columns(channels, GROUP: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return (local indices, channel indices, mask of those that exist) of a block of groups."""
    local = tl.arange(0, WIDTH)
    column = tl.program_id(0) * (PER_BLOCK * GROUP) + local
    return local, column, (local < PER_BLOCK * GROUP) & (column < channels)


@triton.jit
def _members(local, real, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Return a mask (channels, groups) of which channel belongs to which group."""
    return (local[:, None] // GROUP == tl.arange(0, GROUPS)[None, :]) & real[:, None]


@triton.jit
def _to_groups(values, members):
    return tl.sum(tl.where(members, values[:, None], 0.0), axis=0)


@triton.jit
def _to_channels(values, members):
    return tl.sum(tl.where(members, values[None, :], 0.0), axis=1)


@triton.jit
def _sigmoid(z, EXACT: tl.constexpr):
    """Return the sigmoid; exact exponentials and quotients would dominate the time, and 16 bits do not need them."""
    if EXACT:
        s = tl.div_rn(1.0, 1.0 + exact_exp(-z))
    else:
        s = 1.0 / (1.0 + tl.exp(-z))
    return s


@triton.jit
def _chunk(column, positions, channels, chunk, ROWS: tl.constexpr):
    """Return (positions of this program's chunk, offset of its first number, rows of a tile, offsets in a tile)."""
    first = tl.program_id(1) * chunk
    start = (tl.program_id(2).to(tl.int64) * positions + first) * channels
    row = tl.arange(0, ROWS)
    return tl.minimum(chunk, positions - first), start, row, row[:, None] * channels + column[None, :]


@triton.jit
def _partial_places(groups, chunks, PER_BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """Return (offsets of the first partials of the groups, distance to the second ones, mask of groups that exist)."""
    local = tl.arange(0, GROUPS)
    group = tl.program_id(0) * PER_BLOCK + local
    start = (tl.program_id(2) * 2 * groups + group) * chunks
    return start, groups * chunks, (local < PER_BLOCK) & (group < groups)


@triton.jit(do_not_specialize=_ANY)
def _moments_kernel(
    x, shift, partials, positions, channels, groups, chunk, chunks,
    GROUP: tl.constexpr, PER_BLOCK: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    local, column, real = _columns(channels, GROUP, PER_BLOCK, WIDTH)
    number, example = tl.program_id(1), tl.program_id(2)
    count, start_of_chunk, row, places = _chunk(column, positions, channels, chunk, ROWS)
    base = x + start_of_chunk
    inside = (row[:, None] < count) & real[None, :]
    head = tl.load(base + places, mask=inside, other=0.0).to(tl.float32)
    center = tl.div_rn(tl.sum(head, axis=0), tl.minimum(count, ROWS).to(tl.float32))
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    squares = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, count, ROWS):
        inside = (start + row[:, None] < count) & real[None, :]
        h = tl.load(base + start * channels + places, mask=inside, other=0.0).to(tl.float32)
        h = tl.where(inside, h - center[None, :], 0.0)
        sums += h
        squares += h * h
    size = count.to(tl.float32)
    total = tl.sum(sums, axis=0)
    apart = tl.div_rn(total, size)
    mean = center + apart
    spread = tl.sum(squares, axis=0) - total * apart
    if SHIFT:
        mean += tl.load(shift + example * channels + column, mask=real, other=0.0).to(tl.float32)
    members = _members(local, real, GROUP, GROUPS)
    pivot = _to_groups(tl.where(local % GROUP == 0, mean, 0.0), members)
    apart_from_pivot = tl.where(members, mean[:, None] - pivot[None, :], 0.0)
    of_group = pivot + tl.div_rn(tl.sum(apart_from_pivot, axis=0), GROUP * 1.0)
    between = tl.where(members, mean[:, None] - of_group[None, :], 0.0)
    spread_of_group = _to_groups(spread, members) + size * tl.sum(between * between, axis=0)
    place, next_half, exists = _partial_places(groups, chunks, PER_BLOCK, GROUPS)
    tl.store(partials + place + number, of_group, mask=exists)
    tl.store(partials + place + next_half + number, spread_of_group, mask=exists)


@triton.jit(do_not_specialize=_ANY)
def _normalize_kernel(
    x, weight, bias, shift, partials, y, means, rstds, positions, channels, groups, chunk, chunks, eps,
    GROUP: tl.constexpr, PER_BLOCK: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, SHIFT: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    local, column, real = _columns(channels, GROUP, PER_BLOCK, WIDTH)
    number, example = tl.program_id(1), tl.program_id(2)
    place, next_half, exists = _partial_places(groups, chunks, PER_BLOCK, GROUPS)
    part = tl.arange(0, CHUNKS)
    known = exists[:, None] & (part[None, :] < chunks)
    sizes = tl.maximum(tl.minimum(chunk, positions - part * chunk), 0).to(tl.float32)[None, :]
    mean_parts = tl.load(partials + place[:, None] + part[None, :], mask=known, other=0.0)
    spread = tl.load(partials + (place + next_half)[:, None] + part[None, :], mask=known, other=0.0)
    total = positions * 1.0
    pivot = tl.sum(tl.where(part[None, :] == 0, mean_parts, 0.0), axis=1)
    apart_from_pivot = tl.where(known, (mean_parts - pivot[:, None]) * sizes, 0.0)
    mean = pivot + tl.div_rn(tl.sum(apart_from_pivot, axis=1), total)
    apart = mean_parts - mean[:, None]
    deviations = tl.sum(spread, axis=1) + tl.sum(tl.where(known, apart * apart * sizes, 0.0), axis=1) * GROUP
    variance = tl.div_rn(deviations, total * GROUP)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    if number == 0:
        group = example * groups + tl.program_id(0) * PER_BLOCK + tl.arange(0, GROUPS)
        tl.store(means + group, mean, mask=exists)
        tl.store(rstds + group, rstd, mask=exists)
    members = _members(local, real, GROUP, GROUPS)
    center = _to_channels(mean, members)
    if SHIFT:
        center -= tl.load(shift + example * channels + column, mask=real, other=0.0).to(tl.float32)
    scale = _to_channels(rstd, members) * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=real, other=0.0).to(tl.float32)
    count, start_of_chunk, row, places = _chunk(column, positions, channels, chunk, ROWS)
    for start in range(0, count, ROWS):
        inside = (start + row[:, None] < count) & real[None, :]
        at = start_of_chunk + start * channels + places
        z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        z = (z - center[None, :]) * scale[None, :] + offset[None, :]
        if SILU:
            z *= _sigmoid(z, y.dtype.element_ty == tl.float32)
        tl.store(y + at, z.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _channel_constants(
    means, rstds, shift, weight, bias, column, real, channels, groups, GROUP: tl.constexpr, SHIFT: tl.constexpr
):
    """Return (mean without the shift, rstd, weight, bias) of the channels of a block."""
    example = tl.program_id(2)
    group = example * groups + column // GROUP
    center = tl.load(means + group, mask=real, other=0.0)
    rstd = tl.load(rstds + group, mask=real, other=0.0)
    if SHIFT:
        center -= tl.load(shift + example * channels + column, mask=real, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    return center, rstd, scale, tl.load(bias + column, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _normal_and_gradient(dy, x, at, inside, center, rstd, scale, offset, SILU: tl.constexpr):
    """Return (n, g) of a tile: the normalized values and their gradient."""
    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    n = (h - center[None, :]) * rstd[None, :]
    if SILU:
        z = n * scale[None, :] + offset[None, :]
        s = _sigmoid(z, dy.dtype.element_ty == tl.float32)
        g = g * (s * (1.0 + z * (1.0 - s)))
    return n, g * scale[None, :]


@triton.jit(do_not_specialize=_ANY)
def _averages_kernel(
    dy, x, weight, bias, shift, means, rstds, partials, positions, channels, groups, chunk, chunks,
    GROUP: tl.constexpr, PER_BLOCK: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    SHIFT: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    local, column, real = _columns(channels, GROUP, PER_BLOCK, WIDTH)
    number = tl.program_id(1)
    center, rstd, scale, offset = _channel_constants(
        means, rstds, shift, weight, bias, column, real, channels, groups, GROUP, SHIFT
    )
    count, start_of_chunk, row, places = _chunk(column, positions, channels, chunk, ROWS)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    products = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, count, ROWS):
        inside = (start + row[:, None] < count) & real[None, :]
        at = start_of_chunk + start * channels + places
        n, g = _normal_and_gradient(dy, x, at, inside, center, rstd, scale, offset, SILU)
        sums += g
        products += tl.where(inside, g * n, 0.0)
    members = _members(local, real, GROUP, GROUPS)
    place, next_half, exists = _partial_places(groups, chunks, PER_BLOCK, GROUPS)
    tl.store(partials + place + number, _to_groups(tl.sum(sums, axis=0), members), mask=exists)
    tl.store(partials + place + next_half + number, _to_groups(tl.sum(products, axis=0), members), mask=exists)


@triton.jit(do_not_specialize=_ANY)
def _gradient_kernel(
    dy, x, weight, bias, shift, means, rstds, partials, more, dx, positions, channels, groups, chunk, chunks,
    GROUP: tl.constexpr, PER_BLOCK: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, SHIFT: tl.constexpr, SILU: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    local, column, real = _columns(channels, GROUP, PER_BLOCK, WIDTH)
    place, next_half, exists = _partial_places(groups, chunks, PER_BLOCK, GROUPS)
    part = tl.arange(0, CHUNKS)
    known = exists[:, None] & (part[None, :] < chunks)
    total = positions * 1.0 * GROUP
    members = _members(local, real, GROUP, GROUPS)
    sums = tl.load(partials + place[:, None] + part[None, :], mask=known, other=0.0)
    average = _to_channels(tl.div_rn(tl.sum(sums, axis=1), total), members)
    products = tl.load(partials + (place + next_half)[:, None] + part[None, :], mask=known, other=0.0)
    slope = _to_channels(tl.div_rn(tl.sum(products, axis=1), total), members)
    center, rstd, scale, offset = _channel_constants(
        means, rstds, shift, weight, bias, column, real, channels, groups, GROUP, SHIFT
    )
    count, start_of_chunk, row, places = _chunk(column, positions, channels, chunk, ROWS)
    for start in range(0, count, ROWS):
        inside = (start + row[:, None] < count) & real[None, :]
        at = start_of_chunk + start * channels + places
        n, g = _normal_and_gradient(dy, x, at, inside, center, rstd, scale, offset, SILU)
        result = (g - average[None, :] - n * slope[None, :]) * rstd[None, :]
        if MORE:
            result += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)


class _Tiling:
    """The division of (batch, positions, channels) into tiles, which depends on the shape alone."""

    def __init__(self, shape: torch.Size, groups: int) -> None:
        batch, positions, channels = shape
        size = channels // groups
        choices = []
        for limit in (128, 256):
            count = min(max(limit // size, 1), groups)
            width = triton.next_power_of_2(count * size)
            blocks = -(-groups // count)
            choices.append((blocks * width, width, count, blocks))
        small, large = choices
        _, width, per_block, blocks = large if large[0] < 0.9 * small[0] else small
        rows = max(4096 // width, 4)
        most = min(max(_PROGRAMS // (blocks * batch), 1), _MOST_CHUNKS)
        tiles = -(-positions // rows)
        chunk = -(-tiles // most) * rows
        self.chunks = -(-positions // chunk)
        self.grid = (blocks, self.chunks, batch)
        self.sizes = (positions, channels, groups, chunk, self.chunks)
        group_count = triton.next_power_of_2(per_block)
        self.shape = {"GROUP": size, "PER_BLOCK": per_block, "GROUPS": group_count, "WIDTH": width, "ROWS": rows}


def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `reference.group_norm` of contiguous tensors."""
    tiling = _Tiling(x.shape, groups)
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(x.shape[0], groups, dtype=torch.float32, device=x.device) for _ in range(2))
    partials = torch.empty(x.shape[0], 2, groups, tiling.chunks, dtype=torch.float32, device=x.device)
    moved = x if shift is None else shift
    _moments_kernel[tiling.grid](x, moved, partials, *tiling.sizes, **tiling.shape, SHIFT=shift is not None)
    _normalize_kernel[tiling.grid](
        x, weight, bias, moved, partials, y, mean, rstd, *tiling.sizes, eps, **tiling.shape, CHUNKS=_MOST_CHUNKS,
        SHIFT=shift is not None, SILU=silu,
    )  # fmt: skip
    return y, mean, rstd


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    shift: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    silu: bool,
    more: Tensor | None,
) -> Tensor:
    """Compute `reference.group_norm_backward` of contiguous tensors."""
    groups = mean.shape[1]
    tiling = _Tiling(x.shape, groups)
    dx = torch.empty_like(x)
    partials = torch.empty(x.shape[0], 2, groups, tiling.chunks, dtype=torch.float32, device=x.device)
    inputs = (dy, x, weight, bias, x if shift is None else shift, mean, rstd, partials)
    options = {**tiling.shape, "SHIFT": shift is not None, "SILU": silu}
    _averages_kernel[tiling.grid](*inputs, *tiling.sizes, **options)
    _gradient_kernel[tiling.grid](
        *inputs, x if more is None else more, dx, *tiling.sizes, **options, CHUNKS=_MOST_CHUNKS, MORE=more is not None
    )
    return dx
