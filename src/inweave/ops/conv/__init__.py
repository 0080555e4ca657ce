"""Convolution with a frozen weight, which saves nothing for the backward pass."""

from inweave.ops.conv.autograd import frozen_conv2d

__all__ = ["frozen_conv2d"]
