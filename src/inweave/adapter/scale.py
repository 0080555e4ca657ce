"""The definition of ``scale``, the number that multiplies an adapter's raw product.

    scale = explicit              the file states it (a scalar `scale` key)
          = 1                     alpha absent, alpha = 0, or no rank (LoKr with two full factors)
          = alpha / sqrt(rank)    rs-LoRA
          = alpha / rank          otherwise

Every trainer that can write alpha = 0 uses it for alpha = rank; a literal zero would silently turn the layer off.
"""

from __future__ import annotations

import math


def scale(alpha: float | None, rank: int | None, *, rslora: bool = False, explicit: float | None = None) -> float:
    """Return the scale of a product."""
    if explicit is not None:
        return explicit
    if alpha is None or alpha == 0 or not rank:
        return 1.0
    return alpha / (math.sqrt(rank) if rslora else rank)
