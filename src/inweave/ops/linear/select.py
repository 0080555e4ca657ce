"""Which implementation runs, by device and shape alone: the same call gives the same bits everywhere.

CUDA, 16 bits           two launches (`triton`) for the adapter of one layer up to rank 64
                        forward up to rank 64: the adapter's part first
CUDA, 16 or 32 bits     cuBLAS products (`cublas`)
everything else         plain torch (`reference`)

Microseconds of the adapter's part in the backward pass on one H200, bf16, in a CUDA graph (`bench/adapter_plans.py`):

                                             cuBLAS   two launches
    1024 x 1280          rank 32               17.7           10.6
    4096 x 1280          rank 32               23.9           17.9
    16384 x 640          rank 32               43.5           29.9
    4608 x 3072          rank 16               55.7           35.1
    4096 x 3072 x 12288  rank 16               89.6           69.8
    three layers of one x, best tile sizes:
    1024 x 1280          rank 32               16.9           17.6
    4096 x 1280          rank 32               36.8           41.1
    16384 x 640          rank 32               71.4           74.1
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from inweave.errors import ConfigError
from inweave.ops.common.select import has_kernels, is_nvidia, on_device_of
from inweave.ops.linear import cublas, reference
from inweave.ops.linear.frozen import Weight, output_count
from inweave.ops.quantized import Rows

_FAST = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_RANK = 64
_MANY_ROWS = 2048
#: with few rows, one program of the first launch reads all columns alone
_WIDEST = 4096


def forward(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    quantized: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (y, S) for x (..., K); S is a matrix (M, r). ``quantized``: x, if it was already quantized for W."""
    rows = x.reshape(-1, x.shape[-1])
    if _adapter_first(rows, weight, bias, down, up):
        from inweave.ops.linear import triton as kernel

        y, hidden = kernel.forward(rows, cast("Tensor", weight), bias, down, up, scale)
    else:
        work = cublas.forward if is_nvidia(x) else reference.forward
        y, hidden = work(rows, weight, bias, down, up, scale, quantized)
    return y.view(*x.shape[:-1], output_count(weight)), hidden


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
    """Return dX in the shape of ``grad_out`` except for its last axis, if ``grad_x``.

    The factors' gradients are added to ``grad_down`` and ``grad_up``, or overwrite them if ``fresh``; their dtype is
    that of x or float32. ``x`` is read for ``grad_down``, and for ``grad_up`` if ``hidden`` is None. ``quantized``: dY,
    if it was already quantized for W.
    """
    rows = grad_out.reshape(-1, grad_out.shape[-1])
    inputs = x.reshape(-1, x.shape[-1])
    if _has_products(rows, inputs, grad_down, grad_up):
        if _in_two_launches(rows, inputs, weight, hidden, down, up, grad_down, grad_up):
            from inweave.ops.linear import triton as kernel

            with on_device_of(rows):
                result = kernel.backward(
                    rows, inputs, hidden, down, up, scale,
                    grad_x=grad_x, grad_down=grad_down, grad_up=grad_up, fresh=fresh,
                )  # fmt: skip
            if result is not None and isinstance(weight, Tensor):
                result.addmm_(rows, weight)
            return None if result is None else result.view(*grad_out.shape[:-1], down.shape[1])
        result = cublas.backward(
            rows, inputs, hidden, weight, down, up, scale,
            grad_x=grad_x, grad_down=grad_down, grad_up=grad_up, fresh=fresh, quantized=quantized,
        )  # fmt: skip
    else:
        for total in (grad_down, grad_up):
            if fresh and total is not None:
                total.zero_()
        result = reference.backward(
            rows, inputs, hidden, weight, down, up, scale,
            grad_x=grad_x, grad_down=grad_down, grad_up=grad_up, quantized=quantized,
        )  # fmt: skip
    return None if result is None else result.view(*grad_out.shape[:-1], down.shape[1])


@torch.no_grad()
def lora_backward(grad_out: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of an adapter alone, y = scale * (x down^T) up^T, without autograd.

    A call can be captured in a CUDA graph once it has run before.

    Args:
        grad_out: dL/dy (..., out).
        x: the input (..., in).
        down: the factor A (r, in).
        up: the factor B (out, r). All tensors have one dtype.
        scale: alpha / r, a number.

    Returns:
        (grad_x, grad_down, grad_up), in the shapes of x, down and up.

    Raises:
        ConfigError: the shapes do not belong together, or the dtypes differ.
    """
    tensors = {"grad_out": grad_out, "x": x, "down": down, "up": up}
    fit = down.dim() == up.dim() == 2 and (down.shape[0], x.shape[-1]) == (up.shape[1], down.shape[1])
    if not fit or grad_out.shape != (*x.shape[:-1], up.shape[0]) or len({each.dtype for each in tensors.values()}) > 1:
        sizes = ", ".join(f"{name} {list(each.shape)} {each.dtype}" for name, each in tensors.items())
        raise ConfigError(
            f"lora_backward: expected x (..., in), down (r, in), up (out, r) and grad_out (..., out) of one dtype; "
            f"got {sizes}"
        )
    grad_down, grad_up = torch.empty_like(down), torch.empty_like(up)
    grad_x = backward(
        grad_out, x, None, None, down, up, scale, grad_down=grad_down, grad_up=grad_up, fresh=True
    )  # fmt: skip
    assert grad_x is not None
    return grad_x, grad_down, grad_up


def _has_products(grad_out: Tensor, x: Tensor, *totals: Tensor | None) -> bool:
    """Return whether cuBLAS has these products."""
    dtype = grad_out.dtype
    return (
        is_nvidia(grad_out)
        and dtype in _FAST
        and x.dtype == dtype
        and all(total is None or total.dtype in (dtype, torch.float32) for total in totals)
    )


def _adapter_first(x: Tensor, weight: Weight, bias: Tensor | None, down: Tensor, up: Tensor) -> bool:
    """Return whether the adapter's part is written first, and the frozen product added to it."""
    tensors = [x, weight, down, up, *([] if bias is None else [bias])]
    return (
        has_kernels(x)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[0] > 0
        and up.shape[1] <= _LARGEST_RANK
        and all(isinstance(tensor, Tensor) and tensor.dtype == x.dtype for tensor in tensors)
        and up.is_contiguous()
        and (bias is None or bias.is_contiguous())
    )


def _in_two_launches(grad_out: Tensor, x: Tensor, weight: Weight | None, *others: Tensor | None) -> bool:
    """Return whether the kernels support these matrices, and are faster."""
    rows = grad_out.shape[0]
    _, down, up, *_ = others
    assert down is not None and up is not None
    return (
        grad_out.dtype != torch.float32
        and (weight is None or isinstance(weight, Tensor))
        and rows > 0
        and up.shape[1] <= _LARGEST_RANK
        and reference.block_count(down, up) == 1
        and (rows >= _MANY_ROWS or max(up.shape[0], down.shape[1]) <= _WIDEST)
        and all(tensor is None or tensor.is_contiguous() for tensor in (grad_out, x, *others))
    )
