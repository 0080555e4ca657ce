"""The operation in plain torch: any dtype, any device. Formulas: `inweave.ops.linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from inweave.ops.linear import frozen
from inweave.ops.linear.frozen import Weight
from inweave.ops.quantized import Rows


def block_count(down: Tensor, up: Tensor) -> int:
    """Return the number of layers that the factors belong to."""
    return down.shape[0] // up.shape[1]


def blocks(matrix: Tensor, count: int) -> Tensor:
    """Return (count, M, columns), the columns of each layer, as a view of a matrix that has them side by side."""
    return matrix.view(matrix.shape[0], count, matrix.shape[1] // count).transpose(0, 1)


def forward(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    quantized: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (y, S) of matrices of one dtype; ``quantized``: x, if it was already quantized for a quantized weight."""
    hidden = x @ down.T
    base = frozen.product(x, weight, bias, quantized)
    if (count := block_count(down, up)) == 1:
        return torch.addmm(base, hidden, up.T, alpha=scale), hidden
    blocks(base, count).baddbmm_(blocks(hidden, count), up.view(count, -1, up.shape[1]).mT, alpha=scale)
    return base, hidden


def backward(
    grad_out: Tensor,
    x: Tensor,
    hidden: Tensor | None,
    weight: Weight | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    *,
    grad_x: bool = True,
    grad_down: Tensor | None = None,
    grad_up: Tensor | None = None,
    quantized: Rows | None = None,
) -> Tensor | None:
    """Return dX if ``grad_x``, and add the factors' gradients to ``grad_down`` and ``grad_up`` if they are passed.

    ``hidden`` None: it is computed again. ``weight`` None: dX of the adapter alone. ``x`` is read only for
    ``grad_down`` and for ``hidden``. ``quantized``: dY, if it was already quantized for a quantized weight.
    """
    wide = torch.promote_types(grad_out.dtype, torch.float32)
    count = block_count(down, up)
    if grad_up is not None:
        hidden = x @ down.T if hidden is None else hidden
        product = blocks(grad_out.to(wide), count).mT @ blocks(hidden.to(wide), count)
        grad_up.add_(product.view(grad_up.shape).to(grad_up.dtype), alpha=scale)
    if grad_down is None and not grad_x:
        return None
    product = blocks(grad_out.to(wide), count) @ up.to(wide).view(count, -1, up.shape[1]) * scale
    inner = product.transpose(0, 1).reshape(-1, down.shape[0]).to(grad_out.dtype)
    if grad_down is not None:
        grad_down.add_((inner.to(wide).T @ x.to(wide)).to(grad_down.dtype))
    if not grad_x:
        return None
    return inner @ down if weight is None else torch.addmm(frozen.gradient(grad_out, weight, quantized), inner, down)
