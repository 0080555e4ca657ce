"""The sum at the end of a residual block of images, with the biases of its convolutions: a reference and a kernel."""

from inweave.ops.residual.autograd import residual_sum

__all__ = ["residual_sum"]
