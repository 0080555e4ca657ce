"""A linear layer with a LoRA as one operation, forward and backward.

    forward    S  = x down^T            y      = x W^T + b + s S up^T
    backward   dS = s dY up             d_up   = s dY^T S
               dX = dY W + dS down      d_down = dS^T x

    x (M, K)   W (N, K)   b (N)   down (r, K)   up (N, r)   S, dS (M, r)   dY (M, N)   s a Python number

    several layers of one x, one width and one rank: W, b, down and up of all of them by rows; up has fewer columns (r)
    than down has rows (count * r); y, S, dY and dS have the layers' columns side by side

Only x and S are saved for the backward pass. The gradient of W is never computed, and nothing of the size of y or x is
written except y and dX. Sums are in float32, in an order that depends on shapes alone: the same inputs give the same
bits.
"""

from inweave.ops.linear.autograd import Rounded, lora_linear
from inweave.ops.linear.frozen import Weight
from inweave.ops.linear.select import lora_backward

__all__ = ["Rounded", "Weight", "lora_backward", "lora_linear"]
