"""One base tensor and what a stack adds to it: W' = round(W + sum_i strength_i * delta_i).

Everything is accumulated in float32 and rounded once, to the dtype of the result. Each delta is taken from the
original W, so the order of a stack does not matter. Plain LoRA pairs of a stack are joined along the rank
and added by a single addmm; every other algorithm adds the change of the one formula (`inweave.ops.delta`).
The sum and the joined factors live in a `Scratch` that the caller owns and passes again for the next tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from inweave.adapter import Lora, Tensor
from inweave.errors import TargetError
from inweave.ops.delta import change, padded
from inweave.ops.merge import all_usable, limit_of, usable_numbers
from inweave.ops.tensors.decode import DTYPE_NAMES, TORCH, decode
from inweave.targets.plan import Piece, Placement
from inweave.weights.scratch import Scratch, padded_size
from inweave.weights.stack import Item

#: reads a base tensor by name, as stored
ReadBase = Callable[[str], torch.Tensor]


def merged(
    base: torch.Tensor,
    items: Sequence[Item],
    read: ReadBase,
    dtype: torch.dtype | None = None,
    *,
    owned: bool = False,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """Return ``base`` with every item added, in ``dtype``.

    ``owned``: ``base`` may be written to. It then takes the sum, or the rounded result, where its dtype allows;
    otherwise it is left alone. ``scratch``: memory for the sum, reused from call to call.
    """
    dtype = dtype or base.dtype
    for item in items:
        if item.placement.widen is not None:
            wider = padded(base, item.placement.widen)
            base, owned = wider, owned or wider is not base
    out = base if owned and base.dtype == dtype else torch.empty(base.shape, dtype=dtype, device=base.device)
    merge_into(out, base, items, read, owned=owned, scratch=scratch)
    return out


def merge_into(
    out: torch.Tensor,
    base: torch.Tensor,
    items: Sequence[Item],
    read: ReadBase,
    *,
    owned: bool = False,
    scratch: Scratch | None = None,
) -> None:
    """Write ``base`` with every item added to ``out``, of the same shape; ``out`` may be ``base`` itself."""
    wide = torch.float64 if base.dtype == torch.float64 else torch.float32
    products, additive, base_dependent = _sorted(items)
    # an original is needed while changes are computed from it; the first such change still finds it in the sum
    reusable = len(base_dependent) < 2
    scratch = scratch or Scratch()
    with scratch.lock:
        needed = sum(_factor_bytes(pairs, wide) for pairs in products.values())
        if _takes_sum(out, wide) and (out is not base or reusable):
            total = out
            scratch.reset(base.device, needed)
        elif owned and _takes_sum(base, wide) and reusable:
            total = base
            scratch.reset(base.device, needed)
        else:
            shape = tuple(base.shape)
            scratch.reset(base.device, needed + padded_size(shape, wide))
            total = scratch.take(shape, wide, base.device)
        if total is not base:
            total.copy_(base)
        for number, item in enumerate((*base_dependent, *additive)):
            target = _rows(total, item.placement)
            original = _rows(base, item.placement) if 0 < number < len(base_dependent) else target
            target += placement_change(item.placement, original, item.strength, read).reshape(target.shape)
        for (start, stop), pairs in products.items():
            whole = (start, stop) == (0, total.shape[0])
            _add_products(total if whole else total[start:stop], pairs, scratch)
        if total is not out:
            out.copy_(total)


def refuse_overflow(name: str | Callable[[], str], result: torch.Tensor, before: Callable[[], torch.Tensor]) -> None:
    """Raise if a result is beyond the limit where its original, which is read only then, is not."""
    if all_usable(result):
        return
    wrong, original = ~usable_numbers(result), before()
    if result.shape != original.shape or bool((wrong & usable_numbers(original)).any()):
        label = name if isinstance(name, str) else name()
        raise TargetError(f"{label}: the result {overflow_of(result.dtype)}; use a wider dtype or a lower strength")


def overflow_of(dtype: torch.dtype) -> str:
    """Return the phrase that says which limit a result exceeds."""
    return f"would overflow {DTYPE_NAMES.get(dtype, dtype)}, which can compute with numbers up to {limit_of(dtype):g}"


Pairs = list[tuple[Lora, float, Placement]]


def _sorted(items: Sequence[Item]) -> tuple[dict[tuple[int, int], Pairs], list[Item], list[Item]]:
    """Products by the rows they share, what else only adds, and what is computed from the original numbers."""
    products: dict[tuple[int, int], Pairs] = {}
    additive, base_dependent = list[Item](), list[Item]()
    for item in items:
        placement, factors = item.placement, item.placement.factors
        if isinstance(factors, Lora) and is_product(placement):
            rows = placement.rows()
            products.setdefault((rows.start, rows.stop), []).append((factors, item.strength, placement))
        else:
            (base_dependent if factors.needs_base() and not placement.whole else additive).append(item)
    return products, additive, base_dependent


def _rows(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    rows = placement.rows()
    return tensor[rows.start : rows.stop] if placement.target is not None else tensor


def is_product(placement: Placement) -> bool:
    """Return whether the change is plain up @ down on these rows: no core, groups, magnitude or reordering."""
    factors = placement.factors
    return (
        isinstance(factors, Lora)
        and factors.mid is None
        and factors.groups == 1
        and factors.magnitude is None
        and factors.residual is None
        and not (factors.transposed or placement.swap or placement.transpose or placement.widen)
    )


def on_rows(items: Sequence[Item], start: int, stop: int) -> list[Item]:
    """Return what rows start..stop of a tensor receive, for plain products."""
    cut = []
    for item in items:
        placement, rows = item.placement, item.placement.rows()
        first, last = max(start, rows.start), min(stop, rows.stop)
        if first < last:
            source = ((placement.source[0] if placement.source else 0) + first - rows.start, last - first)
            here = replace(placement, target=(first - start, last - first), source=source)
            cut.append(Item(replace(here, shape=(stop - start, *placement.shape[1:])), item.strength))
    return cut


def _takes_sum(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether changes can be summed in this tensor itself: it has the dtype of the sum, and rows are
    matrices.
    """
    return tensor.dtype == dtype and (tensor.dim() <= 2 or tensor.is_contiguous())


def _factor_bytes(pairs: Pairs, dtype: torch.dtype) -> int:
    """Return the scratch memory that the joined factors of one run of rows need."""
    rank, rows, columns = _joined_shape(pairs)
    return padded_size((rows, rank), dtype) + padded_size((rank, columns), dtype)


def _joined_shape(pairs: Pairs) -> tuple[int, int, int]:
    """Return (rank, rows, columns) of a stack's factors side by side."""
    first, _, placement = pairs[0]
    rank = sum(factors.down.shape[0] for factors, _, _ in pairs)
    return rank, len(placement.rows()), math.prod(first.down.shape[1:])


def _add_products(target: torch.Tensor, pairs: Pairs, scratch: Scratch) -> None:
    """Add [s1*up1 s2*up2 ..] @ [down1; down2; ..] to target, with one addmm for the whole stack."""
    device, dtype = target.device, target.dtype
    rank, rows, columns = _joined_shape(pairs)
    up, down = scratch.take((rows, rank), dtype, device), scratch.take((rank, columns), dtype, device)
    at = 0
    for factors, strength, placement in pairs:
        stop = at + factors.down.shape[0]
        stored = _stored(factors.up, device).flatten(1)
        if placement.source is not None:
            stored = stored[placement.source[0] : sum(placement.source)]
        up[:, at:stop].copy_(stored).mul_(factors.scale * strength)
        down[at:stop].copy_(_stored(factors.down, device).flatten(1))
        at = stop
    flat = target.view(target.shape[0], -1)
    torch.addmm(flat, up, down, out=flat)


def _stored(factor: Tensor, device: torch.device) -> torch.Tensor:
    """Return a factor in the dtype of its file; on the CPU a view of the file."""
    return decode(factor, dtype=TORCH[factor.dtype], device=device)


def placement_change(placement: Placement, original: torch.Tensor, strength: float, read: ReadBase) -> torch.Tensor:
    """Return the change of one placement on its rows, computed from the weight the adapter was made for."""
    factors = placement.factors
    if placement.whole:
        weight: torch.Tensor | None = torch.cat([_piece(piece, read) for piece in placement.whole])
    elif placement.creates and not factors.needs_base():
        weight = None
    else:
        weight = original
        if placement.transpose:
            weight = weight.T
        if placement.swap:
            weight = torch.cat(weight.chunk(2)[::-1])
    if placement.source is not None and not placement.whole:
        cut = factors.rows(*placement.source)
        if cut is not None:
            return _turned(change(cut, weight, strength), placement)
        # no exact cut (a Tucker core, say): the whole change is built and sliced
        if factors.needs_base():
            raise TargetError(f"{placement.tensor}: {factors.kind} cannot be cut at rows {placement.source}")
        weight = None
    result = change(factors, weight, strength)
    if placement.source is not None:
        result = result[placement.source[0] : sum(placement.source)]
    return _turned(result, placement)


def _turned(result: torch.Tensor, placement: Placement) -> torch.Tensor:
    if placement.swap:
        result = torch.cat(result.chunk(2)[::-1])
    return result.T if placement.transpose else result


def _piece(piece: Piece, read: ReadBase) -> torch.Tensor:
    tensor = read(piece.tensor)
    if piece.rows is not None:
        tensor = tensor[piece.rows[0] : sum(piece.rows)]
    if piece.transpose:
        tensor = tensor.T
    return torch.cat(tensor.chunk(2)[::-1]) if piece.swap else tensor
