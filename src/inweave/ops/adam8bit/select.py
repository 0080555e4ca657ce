"""Which implementation runs: the kernel for the CUDA tensors it supports, the reference for all others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inweave.ops.adam8bit import reference
from inweave.ops.adam8bit.reference import corrections
from inweave.ops.common.select import has_kernels, on_device_of


@torch.no_grad()
def step(
    values: Tensor,
    grads: Tensor,
    m_codes: Tensor,
    m_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    *,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    count: Tensor,
    ok: Tensor,
    grad_scale: Tensor,
) -> None:
    """Take one AdamW step on flat float32 ``values``, in place; the formula is in `reference`.

    ``lr``          0-dim, or one number per block of 256
    ``count``       0-dim: the number of steps, this one included
    ``ok``          0-dim: if it is 0 nothing changes, whatever the gradients contain
    ``grad_scale``  0-dim: multiplies the gradient (clipping, unscaling)

    Nothing is copied to the host: a call can be captured in a CUDA graph once it has run before.
    """
    inverse = corrections(count, beta1, beta2)
    tensors = (values, grads, m_codes, m_scales, v_codes, v_scales)
    dense = all(has_kernels(tensor) and tensor.is_contiguous() for tensor in (*tensors, lr, ok, grad_scale, inverse))
    floats = all(tensor.dtype == torch.float32 for tensor in (values, grads, lr, grad_scale))
    work: Callable[..., None] = reference.step
    if dense and floats:
        from inweave.ops.adam8bit import triton as kernel

        work = kernel.step
    with on_device_of(values):
        work(
            *tensors, lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay,
            inverse=inverse, ok=ok, grad_scale=grad_scale,
        )  # fmt: skip
