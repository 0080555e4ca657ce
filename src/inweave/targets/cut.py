"""Cutting and joining factors along output rows, without touching a matrix's values.

    cut    fused -> parts   parts share `down` and take their rows of `up`; an `up` that is block-sparse
                            gives each part its own rank block, with alpha divided so that the scale stays
    join   parts -> fused   equal `down`s are shared again; different ones are stacked under a
                            block-diagonal `up` of rank r1 + r2 + ..., alpha = scale * (r1 + r2 + ...)

Each undoes the other bit for bit. What cannot be cut or joined exactly gives None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from inweave.adapter import Factors, Full, Loha, Lokr, Lora, Magnitude, Tensor, scalar, stacked
from inweave.adapter.factors import magnitude_rows


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a joined tensor was made: each part's rank (0: the part was absent), own alpha, or a shared down."""

    ranks: tuple[int, ...]
    alphas: tuple[float | None, ...]
    shared: bool


def cut(factors: Factors, sizes: Sequence[int], made: Blocks | None = None) -> list[Factors | None] | None:
    """The parts of a fused change (None for a part that never was there), or None if it cannot be cut."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if made is not None and _still_true(made, factors, len(sizes)):
        if isinstance(factors, Lora) and not made.shared:
            return _cut_blocks(factors, starts, sizes, made)
        parts = [factors.rows(a, n) if rank else None for a, n, rank in zip(starts, sizes, made.ranks, strict=True)]
        return parts if all(p is not None or not r for p, r in zip(parts, made.ranks, strict=True)) else None
    if isinstance(factors, Lora) and (blocks := _block_sparse(factors, starts, sizes)):
        return _cut_blocks(factors, starts, sizes, blocks)
    rows = [factors.rows(a, n) for a, n in zip(starts, sizes, strict=True)]
    return None if any(part is None for part in rows) else list(rows)


def _still_true(made: Blocks, factors: Factors, parts: int) -> bool:
    """A record survives in metadata; it is used only where it still describes the tensors."""
    if len(made.ranks) != parts or len(made.alphas) != parts or not any(made.ranks):
        return False
    return made.shared or (isinstance(factors, Lora) and sum(made.ranks) == factors.rank)


def _cut_blocks(factors: Lora, starts: Sequence[int], sizes: Sequence[int], made: Blocks) -> list[Factors | None]:
    parts: list[Factors | None] = []
    column = 0
    for start, size, rank, alpha in zip(starts, sizes, made.ranks, made.alphas, strict=True):
        if not rank:
            parts.append(None)
            continue
        up = _columns(factors.up.rows(start, size), column, rank)
        stored = _stored(alpha, factors.stored_alpha)
        parts.append(
            replace(
                factors,
                up=up,
                down=factors.down.rows(column, rank),
                alpha=alpha,
                stored_alpha=stored,
                magnitude=magnitude_rows(factors.magnitude, factors.up.shape[0], start, size),
            )
        )
        column += rank
    return parts


def _stored(alpha: float | None, like: Tensor | None) -> Tensor | None:
    if alpha is None or like is None:
        return None
    try:
        return scalar(alpha, like.dtype, like.shape)
    except ValueError:
        return None


def _block_sparse(factors: Lora, starts: Sequence[int], sizes: Sequence[int]) -> Blocks | None:
    """Equal rank blocks that only their own rows use, as kohya's split_qkv saves them."""
    parts, rank = len(sizes), factors.rank
    if factors.groups != 1 or factors.mid is not None or parts < 2 or rank % parts:
        return None
    width = rank // parts
    alpha = None if factors.alpha is None else factors.alpha / parts
    if factors.stored_alpha is not None and alpha is not None and _stored(alpha, factors.stored_alpha) is None:
        return None  # the file's dtype cannot hold the divided alpha: keep the parts' shared form
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = factors.up.rows(start, size)
        if not _zero_outside(rows, number * width, width) or not any(bytes(_columns(rows, number * width, width).data)):
            return None
    return Blocks((width,) * parts, (alpha,) * parts, shared=False)


def _zero_outside(tensor: Tensor, column: int, width: int) -> bool:
    data, item = memoryview(tensor.data), tensor.itemsize
    stride = len(data) // tensor.shape[0]
    left, right = column * item, (column + width) * item
    before, after = bytes(left), bytes(stride - right)
    return all(
        data[i : i + left] == before and data[i + right : i + stride] == after for i in range(0, len(data), stride)
    )


def _columns(tensor: Tensor, column: int, width: int) -> Tensor:
    data, item = memoryview(tensor.data), tensor.itemsize
    stride = len(data) // tensor.shape[0]
    left, right = column * item, (column + width) * item
    cut_out = b"".join(data[i + left : i + right] for i in range(0, len(data), stride))
    return Tensor(tensor.dtype, (tensor.shape[0], width, *tensor.shape[2:]), cut_out)


def join(parts: Sequence[Factors | None], sizes: Sequence[int]) -> tuple[Factors, Blocks] | None:
    """One fused change out of the parts that are there, or None where no exact form exists."""
    there = [part for part in parts if part is not None]
    first = there[0]
    if any(type(part) is not type(first) for part in there):
        return None
    if isinstance(first, Full):
        return _join_full(parts, sizes)
    magnitude = _joined_magnitude(parts)
    if magnitude is False:
        return None
    if isinstance(first, Lora) and all(isinstance(part, Lora) and part.groups == 1 for part in there):
        return _join_lora([part if isinstance(part, Lora) else None for part in parts], sizes, magnitude)
    if isinstance(first, Loha | Lokr):
        return _join_products(parts, sizes, magnitude)
    return None


def _join_full(parts: Sequence[Factors | None], sizes: Sequence[int]) -> tuple[Factors, Blocks] | None:
    there = [part for part in parts if isinstance(part, Full)]
    first = there[0]
    if any(
        (p.mode, p.value.dtype, p.scale, p.value.shape[1:])
        != (first.mode, first.value.dtype, first.scale, first.value.shape[1:])
        for p in there
    ):
        return None
    if len(there) < len(parts) and first.mode == "set":
        return None
    tail = first.value.shape[1:]
    width = len(first.value.data) // first.value.shape[0]
    values = [
        p.value if isinstance(p, Full) else Tensor(first.value.dtype, (n, *tail), bytes(n * width))
        for p, n in zip(parts, sizes, strict=True)
    ]
    made = Blocks(tuple(1 if p is not None else 0 for p in parts), (None,) * len(parts), shared=True)
    return replace(first, value=stacked(values)), made


def _join_products(
    parts: Sequence[Factors | None], sizes: Sequence[int], magnitude: Magnitude | None
) -> tuple[Factors, Blocks] | None:
    """LoHa and LoKr join where they were cut: the row factors stack, all others must be the same."""
    there = [part for part in parts if part is not None]
    first = there[0]
    rows = ("w1_a", "w2_a") if isinstance(first, Loha) else ("w1",) if "w1" in first.tensors() else ("w1_a",)
    unit = first.factor_shapes()[1][0] if isinstance(first, Lokr) else 1
    shared = {role: tensor for role, tensor in first.tensors().items() if role not in rows}
    if isinstance(first, Loha) and first.t1 is not None:
        return None
    for part in there:
        own = part.tensors()
        if own.keys() != first.tensors().keys() or part.alpha != first.alpha or part.residual or part.stored_scale:
            return None
        if any(not own[role].same(tensor) for role, tensor in shared.items()):
            return None
    stacks = {
        role: stacked(
            [
                part.tensors()[role] if part is not None else _zero_rows(first.tensors()[role], size // unit)
                for part, size in zip(parts, sizes, strict=True)
            ]
        )
        for role in rows
    }
    made = Blocks(tuple(1 if p is not None else 0 for p in parts), (first.alpha,) * len(parts), shared=True)
    fields: dict[str, Any] = {**stacks, "magnitude": magnitude}
    return replace(first, **fields), made


def _join_lora(
    parts: Sequence[Lora | None], sizes: Sequence[int], magnitude: Magnitude | None
) -> tuple[Factors, Blocks] | None:
    there = [part for part in parts if part is not None]
    first = there[0]
    tail = first.down.shape[1:]
    if any(p.mid is not None or p.down.shape[1:] != tail or p.up.dtype != first.up.dtype for p in there):
        return None
    if any(p.down.dtype != first.down.dtype or p.up.shape[2:] != first.up.shape[2:] or p.residual for p in there):
        return None
    scales = {part.scale for part in there}
    if len(scales) > 1 or len({p.alpha is None for p in there}) > 1 or any(p.stored_scale for p in there):
        return None
    ranks = tuple(part.rank if part is not None else 0 for part in parts)
    alphas = tuple(part.alpha if part is not None else None for part in parts)
    if all(part.down.same(first.down) and part.alpha == first.alpha for part in there):
        up = stacked([p.up if p is not None else _zero_rows(first.up, n) for p, n in zip(parts, sizes, strict=True)])
        return replace(first, up=up, magnitude=magnitude), Blocks(ranks, alphas, shared=True)
    total = sum(ranks)
    alpha = None if first.alpha is None else scales.pop() * (total**0.5 if first.rslora else total)
    up = _block_diagonal(parts, sizes, total, first.up)
    down = stacked([part.down for part in there])
    stored = _stored(alpha, first.stored_alpha)
    if first.stored_alpha is not None and stored is None and alpha is not None:
        stored = scalar(alpha, "F32", first.stored_alpha.shape) if _fits_single(alpha) else None
    joined = replace(first, up=up, down=down, alpha=alpha, stored_alpha=stored, magnitude=magnitude)
    return joined, Blocks(ranks, alphas, shared=False)


def _fits_single(value: float) -> bool:
    try:
        scalar(value, "F32")
    except ValueError:
        return False
    return True


def _zero_rows(like: Tensor, count: int) -> Tensor:
    width = len(like.data) // like.shape[0]
    return Tensor(like.dtype, (count, *like.shape[1:]), bytes(count * width))


def _block_diagonal(parts: Sequence[Lora | None], sizes: Sequence[int], total: int, like: Tensor) -> Tensor:
    item, column = like.itemsize, 0
    pieces: list[bytes | memoryview] = []
    for part, size in zip(parts, sizes, strict=True):
        if part is None:
            pieces.append(bytes(size * total * item))
            continue
        data, width = memoryview(part.up.data), part.rank * item
        before, after = bytes(column * item), bytes((total - column - part.rank) * item)
        for i in range(0, len(data), width):
            pieces += (before, data[i : i + width], after)
        column += part.rank
    return Tensor(like.dtype, (sum(sizes), total, *like.shape[2:]), b"".join(pieces))


def _joined_magnitude(parts: Sequence[Factors | None]) -> Magnitude | Literal[False] | None:
    """Output-axis magnitudes stack; an input-axis one belongs to its own rows and cannot cross a border."""
    magnitudes = [part.magnitude if part is not None else None for part in parts]
    if all(magnitude is None for magnitude in magnitudes):
        return None
    on_rows = [magnitude for magnitude in magnitudes if magnitude is not None and magnitude.axis == "out"]
    if len(on_rows) < len(parts) or any(m.tensor.shape[1:] != on_rows[0].tensor.shape[1:] for m in on_rows):
        return False
    if any(m.tensor.dtype != on_rows[0].tensor.dtype for m in on_rows):
        return False
    return Magnitude(stacked([m.tensor for m in on_rows]), "out")


def swapped(factors: Factors) -> Factors | None:
    """The two halves of the output rows exchanged: (shift, scale) <-> (scale, shift)."""
    if isinstance(factors, Full):
        return replace(factors, value=_halves(factors.value))
    if isinstance(factors, Loha) and factors.t1 is None and factors.cuttable():
        return replace(
            factors, w1_a=_halves(factors.w1_a), w2_a=_halves(factors.w2_a), magnitude=_swapped_magnitude(factors)
        )
    if isinstance(factors, Lokr) and factors.cuttable():
        left = factors.w1 if factors.w1 is not None else factors.w1_a
        if left is None or left.shape[0] % 2:
            return None
        role = {"w1": _halves(left)} if factors.w1 is not None else {"w1_a": _halves(left)}
        fields: dict[str, Any] = {**role, "magnitude": _swapped_magnitude(factors)}
        return replace(factors, **fields)
    if isinstance(factors, Lora) and factors.groups == 1:
        magnitude = factors.magnitude
        if magnitude is not None and magnitude.axis == "out":
            magnitude = replace(magnitude, tensor=_halves(magnitude.tensor))
        return replace(factors, up=_halves(factors.up), magnitude=magnitude)
    return None


def _swapped_magnitude(factors: Factors) -> Magnitude | None:
    magnitude = factors.magnitude
    return None if magnitude is None else replace(magnitude, tensor=_halves(magnitude.tensor))


def _halves(tensor: Tensor) -> Tensor:
    half = tensor.shape[0] // 2
    return stacked([tensor.rows(half, half), tensor.rows(0, half)])
