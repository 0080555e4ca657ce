"""The operation in plain torch: any dtype, any device. Formulas: `inweave.ops.linear`."""

from __future__ import annotations

import torch


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor, up: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, S) of matrices of one dtype."""
    hidden = x @ down.T
    base = x @ weight.T if bias is None else torch.addmm(bias, x, weight.T)
    return torch.addmm(base, hidden, up.T, alpha=scale), hidden


def backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    hidden: torch.Tensor | None,
    weight: torch.Tensor | None,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    *,
    grad_x: bool = True,
    grad_down: torch.Tensor | None = None,
    grad_up: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """dX if ``grad_x``; the factors' gradients are added to ``grad_down`` and ``grad_up`` where these are given.

    ``hidden`` None: it is computed again. ``weight`` None: dX of the adapter alone. ``x`` is read only for ``grad_down``
    and for ``hidden``.
    """
    wide = torch.promote_types(grad_out.dtype, torch.float32)
    if grad_up is not None:
        hidden = x @ down.T if hidden is None else hidden
        grad_up.add_((grad_out.to(wide).T @ hidden.to(wide)).to(grad_up.dtype), alpha=scale)
    if grad_down is None and not grad_x:
        return None
    inner = (grad_out.to(wide) @ up.to(wide) * scale).to(grad_out.dtype)
    if grad_down is not None:
        grad_down.add_((inner.to(wide).T @ x.to(wide)).to(grad_down.dtype))
    if not grad_x:
        return None
    return inner @ down if weight is None else torch.addmm(grad_out @ weight, inner, down)
