"""The one definition of ``scale``, the number that multiplies an adapter's raw product.

    scale = explicit              the file states it (a scalar `scale` key)
          = 1                     alpha absent, alpha = 0, or no rank (LoKr with two full factors)
          = alpha / sqrt(rank)    rs-LoRA
          = alpha / rank          everyone else

alpha = 0 means "alpha = rank" to every trainer that can write it; a literal zero would switch the
layer off in silence.
"""

from __future__ import annotations

import math


def scale(alpha: float | None, rank: int | None, *, rslora: bool = False, explicit: float | None = None) -> float:
    if explicit is not None:
        return explicit
    if alpha is None or alpha == 0 or not rank:
        return 1.0
    return alpha / (math.sqrt(rank) if rslora else rank)
