"""The two low-rank products that the algorithms are built from, with shapes checked before any arithmetic.

matmul   flat(left) @ flat(right)
tucker   [o,i,...] = sum_ab left[a,o] * core[a,b,...] * right[b,i]
"""

from __future__ import annotations

import torch

from inweave.ops.delta.fit import flat, misfit


def matmul(kind: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    left, right = matrices(kind, left, right)
    return left @ right


def matrices(kind: str, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both factors flattened; raise TargetError if they cannot be multiplied."""
    left, right = flat(kind, left), flat(kind, right)
    if left.shape[1] != right.shape[0]:
        raise misfit(kind, f"{tuple(left.shape)} cannot multiply", f"({left.shape[1]}, ...)", right)
    return left, right


def tucker(kind: str, core: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    left, right = flat(kind, left), flat(kind, right)
    expected = (left.shape[0], right.shape[0])
    if tuple(core.shape[:2]) != expected:
        raise misfit(kind, "the core does not fit its factors", expected, core)
    return torch.einsum("ab...,ao,bi->oi...", core, left, right)


def factor(kind: str, a: torch.Tensor, b: torch.Tensor, core: torch.Tensor | None) -> torch.Tensor:
    """Return one half of LoHa, or one side of LoKr; with a core, ``a`` is stored transposed."""
    return matmul(kind, a, b) if core is None else tucker(kind, core, a, b)
