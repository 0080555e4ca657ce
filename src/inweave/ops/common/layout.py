"""Images as the kernels see them: (batch, channels, height, width) in channels-last memory is (batch, positions, channels)."""

from __future__ import annotations

import torch


def as_rows(image: torch.Tensor) -> torch.Tensor:
    """(batch, positions, channels), contiguous; a view if the image is channels-last."""
    return image.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).flatten(1, 2)


def as_image(rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The way back, always a view."""
    return rows.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)


def as_channels_last(image: torch.Tensor) -> torch.Tensor:
    """The image in channels-last memory, with the strides that torch knows it by.

    The first stride of a batch of one means nothing, and elementwise operations choose any. Some of them make torch take the image for
    channels-first: a convolution of 1 x 1 then copies it.
    """
    return as_image(as_rows(image), image.shape)
