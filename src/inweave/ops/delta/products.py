"""The raw product of stored factors, before scale and strength: which formula belongs to which algorithm.

    Lora   `lora.product`      Loha   `loha.product`      Lokr   `lokr.product`       layers use the same three
    Vera   `vera.product`      Glora  `glora.product`     Full   its value

A product has the shape its factors give it; `fit.fitted` lays it on the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from inweave.adapter import Factors, Full, Glora, Loha, Lokr, Lora, Vera
from inweave.errors import TargetError
from inweave.ops.delta import glora, loha, lokr, lora, vera
from inweave.ops.tensors.decode import Reader

#: algorithms whose product needs their own tensors alone, passed by role
FORMULAS: dict[type[Factors], Callable[..., torch.Tensor]] = {
    Lora: lora.product,
    Loha: loha.product,
    Lokr: lokr.product,
}


def product(factors: Factors, read: Reader, shape: Sequence[int] | None, weight: torch.Tensor | None) -> torch.Tensor:
    """The raw product of an algorithm that adds to the weight."""
    tensors = {role: read(tensor) for role, tensor in factors.tensors().items()}
    match factors:
        case Full():
            return tensors["value"]
        case Vera():
            return vera.product(**tensors, columns=None if shape is None else math.prod(shape[1:]))
        case Glora() if weight is not None:
            return glora.product(**tensors, layout=factors.layout, weight=weight)
    if type(factors) not in FORMULAS:
        raise TargetError(f"{factors.kind}: there is no formula for {type(factors).__name__}")
    return FORMULAS[type(factors)](**tensors)
