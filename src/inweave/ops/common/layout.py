"""Images as kernels see them: channels-last (batch, channels, height, width) is (batch, positions, channels)."""

from __future__ import annotations

import torch
from torch import Tensor


def as_rows(image: Tensor) -> Tensor:
    """Return (batch, positions, channels), contiguous; a view if the image is channels-last."""
    return image.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).flatten(1, 2)


def as_image(rows: Tensor, shape: torch.Size) -> Tensor:
    """Return the image of rows, always a view."""
    return rows.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)


def as_channels_last(image: Tensor) -> Tensor:
    """Return the image in channels-last memory, with strides that torch recognizes as such.

    The first stride of a batch of one has no meaning, so elementwise operations choose any. With some values torch
    takes the image for channels-first, and a 1 x 1 convolution then copies it.
    """
    return as_image(as_rows(image), image.shape)
