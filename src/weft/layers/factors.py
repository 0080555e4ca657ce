"""A live pair of parameters <-> the canonical factors.

    Pair --to_factors--> Lora --weft.ops.delta--> what merging adds;  --weft.formats--> a file
    Lora --to_pair-----> Pair

The bytes are the parameters' own; a dtype changes only where it is asked for.
"""

from __future__ import annotations

import math

import torch

from weft.adapter import Factors, Lora, Magnitude, Tensor, algorithm
from weft.layers.pair import Pair
from weft.ops.decode import TORCH, decode

_NAMES = {dtype: name for name, dtype in TORCH.items()}


def encoded(tensor: torch.Tensor) -> Tensor:
    """The bits of a torch tensor, on the host."""
    host = tensor.detach().cpu().contiguous()
    return Tensor(_NAMES[tensor.dtype], tuple(tensor.shape), host.flatten().view(torch.uint8).numpy().tobytes())


def to_factors(pair: Pair, *, transposed: bool, embedding: bool = False) -> Lora:
    return Lora(
        down=encoded(pair.down),
        up=encoded(pair.up),
        mid=None if pair.mid is None else encoded(pair.mid),
        magnitude=None if pair.magnitude is None else Magnitude(encoded(pair.magnitude), "out"),
        alpha=pair.alpha,
        stored_alpha=pair.stored_alpha,
        stored_scale=pair.stored_scale,
        stabilised=pair.stabilised,
        transposed=transposed,
        embedding=embedding,
    )


def obstacle(factors: Factors, out: int, into: tuple[int, ...], groups: int) -> str | None:
    """Why these factors cannot be a layer on a weight (out, into...), or None if they can."""
    if not isinstance(factors, Lora):
        return f"{algorithm(factors)} is not a low-rank pair"
    if factors.residual is not None:
        return "it has a sparse residual"
    if factors.widen is not None:
        return "it widens the weight"
    if factors.magnitude is not None and factors.magnitude.axis == "in":
        return "its DoRA magnitude is along the inputs"
    if factors.magnitude is not None and factors.magnitude.tensor.numel != out:
        return f"its DoRA magnitude has {factors.magnitude.tensor.numel} numbers for {out} outputs"
    got = (factors.up.shape[0], math.prod(factors.shape()[1:]))
    if got != (out, math.prod(into)):
        return f"it changes {list(got)}, the layer has {[out, math.prod(into)]}"
    if factors.mid is not None:
        ranks = (factors.up.shape[1], factors.down.shape[0])
        return None if factors.mid.shape[:2] == ranks else f"its core {factors.mid.shape} does not meet {ranks}"
    if factors.groups not in ((1, groups) if groups > 1 else range(1, factors.rank + 1)):
        return f"its {factors.groups} blocks do not meet the layer's {groups} groups"
    return None


def to_pair(
    factors: Lora,
    out: int,
    into: tuple[int, ...],
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    dropout: float = 0.0,
) -> Pair:
    """A pair of owned parameters with these numbers, in ``dtype`` or in the dtype they are stored in."""

    def read(tensor: Tensor, *shape: int) -> torch.Tensor:
        stored = TORCH[tensor.dtype]
        kept = stored if stored in (torch.float64, torch.float32, torch.float16, torch.bfloat16) else torch.float32
        return decode(tensor, dtype=dtype or kept, device=device).reshape(shape).clone()

    flat = [1] * (len(into) - 1)
    rank, columns = factors.down.shape[0], factors.up.shape[1]
    magnitude = factors.magnitude
    return Pair(
        read(factors.down, rank, *((into[0], *flat) if factors.mid is not None else into)),
        read(factors.up, out, columns, *flat),
        mid=None if factors.mid is None else read(factors.mid, columns, rank, *into[1:]),
        magnitude=None if magnitude is None else read(magnitude.tensor, out),
        alpha=factors.alpha,
        stabilised=factors.stabilised,
        dropout=dropout,
        stored_alpha=factors.stored_alpha,
        stored_scale=factors.stored_scale,
    )
