"""Which implementation quantizes rows: one kernel on a GPU, plain operations everywhere else and in compiled regions.

A compiler fuses plain operations into the kernel that produces x, which is then not read again, and not even written if
nothing else reads it. For the same x the bits are the same; but a fused kernel quantizes its results before they are
rounded to 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inweave.ops.common.select import has_kernels, on_device_of
from inweave.ops.fp8 import reference

#: numbers (M, K) in e4m3 and scales (M, 1) in float32
Rows = tuple[Tensor, Tensor]


def quantize_rows(x: Tensor) -> Rows:
    """Return (e4m3, scales): the shape (M, K) of x, and (M, 1) in float32; the formula is in `reference`."""
    if has_kernels(x):
        from inweave.ops.fp8 import triton as kernel

        with on_device_of(x):
            return kernel.quantize_rows(x.contiguous())
    return reference.quantize_rows(x)


def is_traced() -> bool:
    """Return whether a compiler should see how rows are quantized (`traced_rows`), rather than an operator."""
    return torch.compiler.is_compiling()


def traced_rows(x: Tensor) -> Rows:
    """Return `quantize_rows` of x (..., K) in plain operations, without a gradient; rows are contiguous."""
    return reference.quantize_rows(x.detach().reshape(-1, x.shape[-1]).contiguous())
