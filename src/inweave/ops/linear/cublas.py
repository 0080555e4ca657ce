"""The operation as cuBLAS products: sums in float32, each result rounded once and added in place by the product itself.

    y  = x W^T + b     then  y  += s S up^T        one product with beta = 1
    dX = dY W          then  dX += dS down
    d_up, d_down       16-bit factors, float32 results: added to the float32 gradient by the product (beta = 1)

The adapter takes five products in all, without casts and elementwise kernels. For several layers the products with `up`
are batched, on views of the matrices that hold them side by side, and the others are one product. In float32 they are
computed one by one: cuBLAS splits the long sum of a narrow product into several with fewer rounding errors each, but
not that of a batch (three times the error for 4,096 rows on an H200, invisible in 16 bits).
"""

from __future__ import annotations

import torch
from torch import Tensor

from inweave.ops.common.select import is_nvidia
from inweave.ops.linear import frozen
from inweave.ops.linear.frozen import Weight
from inweave.ops.linear.reference import block_count, blocks
from inweave.ops.quantized import Rows


def forward(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    quantized: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `reference.forward`."""
    hidden = torch.mm(x, down.T)
    y = frozen.product(x, weight, bias, quantized)
    if (count := block_count(down, up)) == 1:
        return y.addmm_(hidden, up.T, alpha=scale), hidden
    blocks(y, count).baddbmm_(blocks(hidden, count), up.view(count, -1, up.shape[1]).mT, alpha=scale)
    return y, hidden


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
    fresh: bool = False,
    quantized: Rows | None = None,
) -> Tensor | None:
    """Compute `reference.backward`; ``fresh``: the factors' gradients are overwritten instead of added to."""
    beta = 0 if fresh else 1
    count = block_count(down, up)
    if grad_up is not None:
        hidden = torch.mm(x, down.T) if hidden is None else hidden
        if count == 1:
            _accumulate(grad_up, grad_out.T, hidden, beta, scale)
        else:
            totals = grad_up.view(count, -1, grad_up.shape[1])
            _accumulate_blocks(totals, blocks(grad_out, count).mT, blocks(hidden, count), beta, scale)
    if grad_down is None and not grad_x:
        return None
    inner = grad_out.new_empty(grad_out.shape[0], down.shape[0])
    if count == 1:
        inner.addmm_(grad_out, up, beta=0, alpha=scale)
    else:
        factors = up.view(count, -1, up.shape[1])
        _accumulate_blocks(blocks(inner, count), blocks(grad_out, count), factors, 0, scale)
    if grad_down is not None:
        _accumulate(grad_down, inner.T, x, beta, 1.0)
    if not grad_x:
        return None
    return torch.mm(inner, down) if weight is None else frozen.gradient(grad_out, weight, quantized).addmm_(inner, down)


def add_product(total: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """Add alpha * left @ right to ``total``; the sum is in float32 at least, for any dtypes and any device."""
    if is_nvidia(left) and (left.dtype == total.dtype or total.dtype == torch.float32):
        _accumulate(total, left, right, 1, alpha)
    else:
        wide = torch.promote_types(left.dtype, torch.float32)
        total.add_((left.to(wide) @ right.to(wide)).to(total.dtype), alpha=alpha)


def _accumulate(total: Tensor, left: Tensor, right: Tensor, beta: int, alpha: float) -> None:
    """Set total = beta * total + alpha * left @ right, in the dtype of ``total``."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=beta, alpha=alpha)
    else:  # 16-bit factors, float32 result: CUDA only
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, beta=beta, alpha=alpha, out=total)


def _accumulate_blocks(totals: Tensor, left: Tensor, right: Tensor, beta: int, alpha: float) -> None:
    """Accumulate one product per layer."""
    if left.dtype == torch.float32:
        for total, one, two in zip(totals, left, right, strict=True):
            total.addmm_(one, two, beta=beta, alpha=alpha)
    elif totals.dtype == left.dtype:
        totals.baddbmm_(left, right, beta=beta, alpha=alpha)
    else:
        torch.ops.aten.baddbmm.dtype_out(totals, left, right, totals.dtype, beta=beta, alpha=alpha, out=totals)
