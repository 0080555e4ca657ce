"""Which implementation runs: one kernel on a GPU, and plain operations everywhere else.

In a compiled region too: of plain operations a compiler makes a part of the kernel that produces x, which then is not read again, and
not even written where nothing else reads it. Of the same x the bits are the same. But such a kernel quantizes what it has computed,
which it has not rounded to 16 bits yet.
"""

from __future__ import annotations

import torch

from inweave.ops.common.select import on_device_of
from inweave.ops.fp8 import reference

#: numbers (M, K) in e4m3 and scales (M, 1) in float32
Rows = tuple[torch.Tensor, torch.Tensor]


def quantize_rows(x: torch.Tensor) -> Rows:
    """(e4m3, scales): (M, K) of the same shape, and (M, 1) in float32; the formula is `reference`'s."""
    if x.is_cuda:
        from inweave.ops.fp8 import triton as kernel

        with on_device_of(x):
            return kernel.quantize_rows(x.contiguous())
    return reference.quantize_rows(x)


def is_traced() -> bool:
    """Whether a compiler is to see how rows are quantized (`traced_rows`), instead of an operator that does it."""
    return torch.compiler.is_compiling()


def traced_rows(x: torch.Tensor) -> Rows:
    """`quantize_rows` in plain operations, without a gradient, of x (..., K); rows of 8 bits lie one after the other, as a product wants."""
    return reference.quantize_rows(x.detach().reshape(-1, x.shape[-1]).contiguous())
