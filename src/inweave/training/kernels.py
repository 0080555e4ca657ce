"""Which kernels the libraries use while a step is computed.

    attention     the fastest kernel for each shape (`inweave.ops.attention`); what that cannot serve is torch's, without cuDNN, whose
                  backward pass reads out of bounds where layouts differ
    convolutions  with `deterministic`, kernels that add in a fixed order

On other devices than a GPU nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel

from inweave.ops.attention import MeasuredAttention


@contextmanager
def step_kernels(device: torch.device, *, deterministic: bool) -> Iterator[None]:
    """The context in which forward passes, recomputed ones too, and their backward passes run."""
    if device.type != "cuda":
        yield
        return
    before, cudnn.deterministic = cudnn.deterministic, deterministic or cudnn.deterministic
    try:
        with (
            sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
            MeasuredAttention(deterministic=deterministic),
        ):
            yield
    finally:
        cudnn.deterministic = before
