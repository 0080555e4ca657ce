"""The sum as one kernel: every number of both images is read once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _residual_sum_kernel(
    a, b, one, two, y, size, CHANNELS: tl.constexpr, BIASES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    channel = at % CHANNELS
    bias = tl.load(one + channel).to(tl.float32)
    if BIASES == 2:
        bias += tl.load(two + channel).to(tl.float32)
    total = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (total + bias).to(y.dtype.element_ty), mask=inside)


def residual_sum(a: Tensor, b: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """Compute `reference.residual_sum` with one or two biases; all tensors are contiguous."""
    y = torch.empty_like(a)
    _residual_sum_kernel[(triton.cdiv(y.numel(), _BLOCK),)](
        a, b, biases[0], biases[-1], y, y.numel(), CHANNELS=y.shape[-1], BIASES=len(biases), BLOCK=_BLOCK
    )
    return y
