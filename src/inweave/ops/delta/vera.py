"""VeRA's product: two trained vectors around a shared random pair, which is cut to the layer's size.

diag(lambda_b) @ up[:out] @ diag(lambda_d) @ down[:, :in]
"""

from __future__ import annotations

import torch

from inweave.ops.delta.fit import flat, misfit


def product(
    lambda_b: torch.Tensor, lambda_d: torch.Tensor, down: torch.Tensor, up: torch.Tensor, *, columns: int | None
) -> torch.Tensor:
    """Return the product as (out, ``columns``), with all columns of the shared pair by default."""
    into, out = lambda_d.flatten(), lambda_b.flatten()
    up, down = flat("vera", up), flat("vera", down)
    columns = down.shape[1] if columns is None else columns
    if not into.numel() == up.shape[1] == down.shape[0]:
        met = (up.shape[1], down.shape[0])
        raise misfit("vera", "up's columns and down's rows against lambda_d", (into.numel(),) * 2, met)
    if up.shape[0] < out.numel() or down.shape[1] < columns:
        shared = (up.shape[0], down.shape[1])
        raise misfit("vera", "the shared pair is too small", f"{(out.numel(), columns)} or more", shared)
    return (out[:, None] * up[: out.numel()]) @ (into[:, None] * down[:, :columns])
