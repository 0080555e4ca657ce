"""Live parameters <-> the canonical factors.

    Pair | Hadamard | Kronecker --to_factors--> Lora | Loha | Lokr --inweave.ops.delta--> what merging adds
                                                                   --inweave.formats----> a file
    Lora | Loha | Lokr --to_term--> Pair | Hadamard | Kronecker

The bytes are the parameters' own; a dtype changes only where it is asked for. A pair takes the layer's axes, the
other two keep the axes of their file: their formulas flatten them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from inweave.adapter import Factors, Loha, Lokr, Lora, Magnitude, Tensor, algorithm
from inweave.layers.loha import Hadamard
from inweave.layers.lokr import Kronecker
from inweave.layers.lora import Pair
from inweave.layers.term import Shared, Term
from inweave.ops.decode import TORCH, decode

_NAMES = {dtype: name for name, dtype in TORCH.items()}
_OWN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def encoded(tensor: torch.Tensor) -> Tensor:
    """The bits of a torch tensor, on the host."""
    host = tensor.detach().cpu().contiguous()
    return Tensor(_NAMES[tensor.dtype], tuple(tensor.shape), host.flatten().view(torch.uint8).numpy().tobytes())


def to_factors(term: Term, *, transposed: bool, embedding: bool = False) -> Factors:
    fields: dict[str, Any] = {role: encoded(value) for role, value in term.roles().items()}
    if embedding:
        fields["embedding"] = True
    if isinstance(term, Kronecker):
        fields["nominal_rank"] = term.nominal_rank
    return term.canonical(
        **fields,
        magnitude=None if term.magnitude is None else Magnitude(encoded(term.magnitude), "out"),
        alpha=term.alpha,
        stored_alpha=term.stored_alpha,
        stored_scale=term.stored_scale,
        rslora=term.rslora,
        transposed=transposed,
    )


def obstacle(factors: Factors, out: int, into: tuple[int, ...], groups: int, *, embedding: bool = False) -> str | None:
    """Why these factors cannot be a layer on a weight (out, into...), or None if they can."""
    if not isinstance(factors, Lora | Loha | Lokr):
        return f"{algorithm(factors)} is neither a low-rank pair nor a LoHa or LoKr"
    if embedding and not isinstance(factors, Lora):
        return f"an embedding takes LoRA only, not {factors.kind}"
    if factors.residual is not None:
        return "it has a sparse residual"
    if factors.widen is not None:
        return "it widens the weight"
    if factors.magnitude is not None and factors.magnitude.axis == "in":
        return "its DoRA magnitude is along the inputs"
    if factors.magnitude is not None and factors.magnitude.tensor.numel != out:
        return f"its DoRA magnitude has {factors.magnitude.tensor.numel} numbers for {out} outputs"
    if not isinstance(factors, Lora):
        return _product_obstacle(factors, out, into)
    got = (factors.up.shape[0], math.prod(factors.shape()[1:]))
    if got != (out, math.prod(into)):
        return f"it changes {list(got)}, the layer has {[out, math.prod(into)]}"
    if factors.mid is not None:
        ranks = (factors.up.shape[1], factors.down.shape[0])
        return None if factors.mid.shape[:2] == ranks else f"its core {factors.mid.shape} does not meet {ranks}"
    if factors.groups not in ((1, groups) if groups > 1 else range(1, factors.rank + 1)):
        return f"its {factors.groups} blocks do not meet the layer's {groups} groups"
    return None


def _product_obstacle(factors: Loha | Lokr, out: int, into: tuple[int, ...]) -> str | None:
    """The formula itself is tried, on shapes without data."""
    if isinstance(factors, Lokr) and not factors.complete():
        return "one of its factors is missing"
    term = _made(factors, lambda tensor: torch.empty(tensor.shape, device="meta"), {})
    try:
        shapes = [term.product().shape]
        if isinstance(term, Hadamard):
            shapes += [half.shape for half in term.halves()]  # a product would also stretch a half of one row
    except (RuntimeError, IndexError) as error:
        return f"its factors do not meet ({str(error).splitlines()[0]})"
    wanted = (out, math.prod(into))
    wrong = next((shape for shape in shapes if shape != wanted), None)
    return None if wrong is None else f"it changes {list(wrong)}, the layer has {list(wanted)}"


def _made(factors: Loha | Lokr, read: Callable[[Tensor], torch.Tensor], shared: Shared) -> Term:
    roles: dict[str, Any] = {role: read(tensor) for role, tensor in factors.tensors().items()}
    if isinstance(factors, Loha):
        return Hadamard(**roles, **shared)
    return Kronecker(**roles, nominal_rank=factors.nominal_rank, **shared)


def to_term(
    factors: Factors,
    out: int,
    into: tuple[int, ...],
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    dropout: float = 0.0,
) -> Term:
    """Owned parameters with these numbers, in ``dtype`` or in the dtype they are stored in.

    The factors are those of a layer (out, into...), see `obstacle`.
    """

    def read(tensor: Tensor) -> torch.Tensor:
        kept = stored if (stored := TORCH[tensor.dtype]) in _OWN else torch.float32
        return decode(tensor, dtype=dtype or kept, device=device).clone()

    shared: Shared = {
        "magnitude": None if factors.magnitude is None else read(factors.magnitude.tensor).reshape(out),
        "alpha": factors.alpha,
        "rslora": factors.rslora,
        "dropout": dropout,
        "stored_alpha": factors.stored_alpha,
        "stored_scale": factors.stored_scale,
    }
    if isinstance(factors, Loha | Lokr):
        return _made(factors, read, shared)
    assert isinstance(factors, Lora)
    flat = [1] * (len(into) - 1)
    rank, columns = factors.down.shape[0], factors.up.shape[1]
    return Pair(
        read(factors.down).reshape(rank, *((into[0], *flat) if factors.mid is not None else into)),
        read(factors.up).reshape(out, columns, *flat),
        mid=None if factors.mid is None else read(factors.mid).reshape(columns, rank, *into[1:]),
        **shared,
    )
