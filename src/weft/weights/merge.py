"""One base tensor and what a stack adds to it: W' = round(W + sum_i strength_i * delta_i).

Everything is accumulated in float32 and rounded once, to the wanted dtype. Each delta is taken from the
original W, so the order of a stack does not matter. Plain LoRA pairs of a stack are joined along the rank
and added by a single addmm; every other algorithm adds the change of the one formula (`weft.ops.delta`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.adapter import Lora
from weft.errors import TargetError
from weft.ops.decode import decode
from weft.ops.delta import change, padded
from weft.targets.plan import Piece, Placement
from weft.weights.stack import Item

#: reads a base tensor by name, as stored
ReadBase = Callable[[str], torch.Tensor]


def merged(base: torch.Tensor, items: Sequence[Item], read: ReadBase, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``base`` with every item added, as a new tensor; ``base`` itself is left alone."""
    wanted = dtype or base.dtype
    for item in items:
        if item.placement.widen is not None:
            base = padded(base, item.placement.widen)
    total = base.to(torch.float32, copy=True) if base.dtype != torch.float64 else base.clone()
    products: dict[tuple[int, int], list[tuple[Lora, float, Placement]]] = {}
    for item in items:
        place, factors = item.placement, item.placement.factors
        rows = place.rows()
        if isinstance(factors, Lora) and is_product(place):
            products.setdefault((rows.start, rows.stop), []).append((factors, item.strength, place))
            continue
        target = total[rows.start : rows.stop] if place.target is not None else total
        original = base[rows.start : rows.stop] if place.target is not None else base
        target += placed_change(place, original, item.strength, read).reshape(target.shape)
    for (start, stop), pairs in products.items():
        rows_view = total[start:stop] if (start, stop) != (0, total.shape[0]) else total
        _add_products(rows_view, pairs)
    return total.to(wanted)


def is_product(place: Placement) -> bool:
    """A plain LoRA whose change is up @ down on these rows: no core, no groups, no magnitude, nothing reordered."""
    factors = place.factors
    return (
        isinstance(factors, Lora)
        and factors.mid is None
        and factors.groups == 1
        and factors.magnitude is None
        and factors.residual is None
        and not (factors.transposed or place.swap or place.transpose or place.widen)
    )


def _add_products(target: torch.Tensor, pairs: Sequence[tuple[Lora, float, Placement]]) -> None:
    """target += [s1*up1 s2*up2 ..] @ [down1; down2; ..], one addmm for the whole stack."""
    device, dtype = target.device, target.dtype
    ups, downs = [], []
    for factors, strength, place in pairs:
        up = decode(factors.up, dtype=dtype, device=device).flatten(1)
        if place.source is not None:
            up = up[place.source[0] : sum(place.source)]
        ups.append(up * (factors.scale * strength))
        downs.append(decode(factors.down, dtype=dtype, device=device).flatten(1))
    up, down = (ups[0], downs[0]) if len(ups) == 1 else (torch.cat(ups, 1), torch.cat(downs, 0))
    flat = target.view(target.shape[0], -1)
    torch.addmm(flat, up, down, out=flat)


def placed_change(place: Placement, original: torch.Tensor, strength: float, read: ReadBase) -> torch.Tensor:
    """The change of one placement on its rows, computed from the weight the adapter was made for."""
    factors = place.factors
    if place.whole:
        weight: torch.Tensor | None = torch.cat([_piece(piece, read) for piece in place.whole])
    elif place.creates and not factors.needs_base():
        weight = None
    else:
        weight = original
        if place.transpose:
            weight = weight.T
        if place.swap:
            weight = torch.cat(weight.chunk(2)[::-1])
    if place.source is not None and not place.whole:
        cut = factors.rows(*place.source)
        if cut is not None:
            return _turned(change(cut, weight, strength), place)
        # no exact cut (a Tucker core, say): the whole change is built and sliced
        if factors.needs_base():
            raise TargetError(f"{place.tensor}: {factors.kind} cannot be cut at rows {place.source}")
        weight = None
    result = change(factors, weight, strength)
    if place.source is not None:
        result = result[place.source[0] : sum(place.source)]
    return _turned(result, place)


def _turned(result: torch.Tensor, place: Placement) -> torch.Tensor:
    if place.swap:
        result = torch.cat(result.chunk(2)[::-1])
    return result.T if place.transpose else result


def _piece(piece: Piece, read: ReadBase) -> torch.Tensor:
    tensor = read(piece.tensor)
    if piece.rows is not None:
        tensor = tensor[piece.rows[0] : sum(piece.rows)]
    if piece.transpose:
        tensor = tensor.T
    return torch.cat(tensor.chunk(2)[::-1]) if piece.swap else tensor
