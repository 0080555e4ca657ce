"""Whole values.

Full, add    product = value
Full, set    change = value - W                                   the strength is ignored
TokenRows    change[indices] = value - W[indices], 0 elsewhere    the strength is ignored
"""

from __future__ import annotations

import torch

from inweave.adapter import Full, TokenRows
from inweave.ops.delta.fit import fitted, misfit
from inweave.ops.tensors.decode import Reader


def product(value: torch.Tensor) -> torch.Tensor:
    """Return the value itself."""
    return value


def replaced(factors: Full, read: Reader, base: torch.Tensor, strength: float) -> torch.Tensor:
    """Return the change that makes the value the new weight."""
    return fitted(factors.kind, read(factors.value), base.shape) - base


def token_rows(factors: TokenRows, read: Reader, base: torch.Tensor, strength: float) -> torch.Tensor:
    """Return the change that gives some rows new values."""
    value = read(factors.value)
    if base.dim() != 2 or value.shape != (len(factors.indices), base.shape[1]):
        raise misfit(factors.kind, "one row per token", (len(factors.indices), base.shape[-1]), value)
    if max(factors.indices, default=0) >= base.shape[0]:
        raise misfit(factors.kind, "a token id is out of range", f"below {base.shape[0]}", max(factors.indices))
    places = torch.tensor(factors.indices, device=base.device)
    result = torch.zeros_like(base)
    result[places] = value - base[places]
    return result
