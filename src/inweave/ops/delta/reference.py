"""The change that is added to a weight: W' = W + change(factors, W, m) at strength m.

    adding       change = m * delta,  delta = scale * (product + dense(residual))      product: `Factors.formula`
    magnitude    V = W + delta;  change = m * (V * magnitude / |V| - W)                DoRA
                 |V| over all axes except the rows (axis "out"), or except the inputs (axis "in")
    replacing    change = new weight - W                                               `Factors.replacement`

`transposed`: W is stored as (in, out, ...); the computation uses W with its first two axes swapped, and the result is
swapped back. `widen`: W is zero-padded to that shape first, and the change has the padded shape:
W' = padded(W, widen) + change.

Everything is computed in float32, or in float64 if the weight is float64, also under autocast. An algorithm that only
adds does not need the values of the weight, which may be None or a meta tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inweave.adapter import Factors, Magnitude, Residual, Tensor, imported
from inweave.errors import TargetError
from inweave.ops.common.precision import without_autocast
from inweave.ops.delta.fit import along, fitted, misfit, padded
from inweave.ops.tensors.decode import Reader, decode


@without_autocast
def change(factors: Factors, weight: torch.Tensor | None, strength: float = 1.0) -> torch.Tensor:
    """Return the change to add to ``weight`` (padded to ``factors.widen``) at a strength."""
    dtype = torch.float64 if weight is not None and weight.dtype == torch.float64 else torch.float32
    shape: Sequence[int] | None = factors.widen
    base, device = None, None
    if weight is not None:
        weight = _swapped(padded(weight, factors.widen), factors.transposed)
        shape = weight.shape
        if not weight.is_meta:
            base, device = weight.to(dtype), weight.device
    elif shape is not None and factors.transposed:
        shape = (*shape[1::-1], *shape[2:])

    def read(tensor: Tensor) -> torch.Tensor:
        return decode(tensor, dtype=dtype, device=device)

    if factors.needs_base():
        if base is None:
            raise TargetError(f"{factors.kind}: the change depends on the base weight, and none was given")
        result = _from_base(factors, read, base, strength)
    else:
        result = strength * _added(factors, read, shape, None)
    return _swapped(result, factors.transposed).contiguous()


def delta(factors: Factors, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Return the change at strength 1."""
    return change(factors, weight)


def _from_base(factors: Factors, read: Reader, base: torch.Tensor, strength: float) -> torch.Tensor:
    if factors.replaces:
        if factors.magnitude is not None or factors.residual is not None:
            raise TargetError(f"{factors.kind}: a magnitude or a residual requires an additive algorithm")
        changed: torch.Tensor = imported(factors.replacement)(factors, read, base, strength)
        return changed
    added = _added(factors, read, base.shape, base)
    if factors.magnitude is None:
        return strength * added
    return strength * (_decomposed(factors.kind, base + added, factors.magnitude, read) - base)


def _added(factors: Factors, read: Reader, shape: Sequence[int] | None, base: torch.Tensor | None) -> torch.Tensor:
    """Return delta = scale * (product + residual)."""
    if not factors.formula:
        raise TargetError(f"{factors.kind}: {type(factors).__name__} has no formula")
    tensors = {role: read(tensor) for role, tensor in factors.tensors().items()}
    product = imported(factors.formula)(**tensors, **factors.formula_options(shape, base))
    total = fitted(factors.kind, product, shape)
    if factors.residual is not None:
        total = total + fitted(factors.kind, _dense(factors.kind, factors.residual, read), total.shape)
    return factors.scale * total


def _dense(kind: str, residual: Residual, read: Reader) -> torch.Tensor:
    """Return the sparse remainder as a matrix; duplicate entries are summed."""
    values = read(residual.values).flatten()
    places = decode(residual.indices, dtype=torch.int64, device=values.device)
    size = decode(residual.size, dtype=torch.int64).flatten().tolist()
    if len(size) != 2 or places.shape != (2, values.numel()):
        raise misfit(kind, f"residual of size {size}: one (row, column) per value", (2, values.numel()), places)
    limit = torch.tensor(size, device=values.device)[:, None]
    if bool(((places < 0) | (places >= limit)).any()):
        raise misfit(kind, "residual: an index is out of range", f"below {size}", places.amax(1).tolist())
    return values.new_zeros(size).index_put_((places[0], places[1]), values, accumulate=True)


def _decomposed(kind: str, changed: torch.Tensor, magnitude: Magnitude, read: Reader) -> torch.Tensor:
    """Scale each row (or input column) of V to its magnitude, as in DoRA; zeros stay zero."""
    axis = 0 if magnitude.axis == "out" else 1
    target = along(f"{kind} magnitude", read(magnitude.tensor), changed, axis)
    others = [i for i in range(changed.dim()) if i != axis]
    norm = torch.linalg.vector_norm(changed, dim=others, keepdim=True) if others else changed.abs()
    return changed / norm.clamp_min(torch.finfo(norm.dtype).tiny) * target


def _swapped(tensor: torch.Tensor, transposed: bool) -> torch.Tensor:
    return tensor.transpose(0, 1) if transposed and tensor.dim() > 1 else tensor
