"""(IA)^3: one number per row or column of the weight.

change = m * W * v          offset; along the rows, or the inputs with `on_input`
change = m * W * (l - 1)    factor; on a bias too, if it is along the rows
"""

from __future__ import annotations

import torch

from inweave.adapter import Ia3
from inweave.ops.delta.fit import along, misfit
from inweave.ops.tensors.decode import Reader


def replaced(factors: Ia3, read: Reader, base: torch.Tensor, strength: float) -> torch.Tensor:
    """Return the change at a strength m."""
    if base.dim() == 1 and (factors.on_input or factors.convention == "offset"):
        raise misfit("ia3", "only output factors scale a bias", "2 axes or more", base)
    vector = along("ia3", read(factors.vector), base, 1 if factors.on_input else 0)
    return strength * base * (vector if factors.convention == "offset" else vector - 1)
