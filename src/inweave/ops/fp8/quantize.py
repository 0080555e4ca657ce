"""Which implementation runs: one kernel on a GPU, and plain operations everywhere else."""

from __future__ import annotations

import torch

from inweave.ops.fp8 import reference
from inweave.ops.implementation import on_device_of


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3, scales): (M, K) of the same shape, and (M, 1) in float32; the formula is `reference`'s."""
    if x.is_cuda:
        from inweave.ops.fp8 import triton as kernel

        with on_device_of(x):
            return kernel.quantize_rows(x.contiguous())
    return reference.quantize_rows(x)
