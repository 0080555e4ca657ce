"""GEGLU and the tanh GELU in plain torch, in float32 throughout; split into forward and backward like the kernels.

    a, b = the halves of the last axis of x
    y    = a * gelu(b)                 gelu(b) = b F(b),  F(b) = (1 + erf(b / sqrt 2)) / 2, the exact GELU

    da = dy * gelu(b)
    db = dy * a * (F(b) + b f(b))      f(b) = exp(-b^2 / 2) / sqrt(2 pi)

erfc is used where F is small: 1 + erf would lose all its digits there.

    z    = 2 sqrt(2 / pi) (x + 0.044715 x^3)
    y    = x S(z)                      S(z) = 1 / (1 + exp(-z)) = (1 + tanh(z / 2)) / 2
    dx   = dy * (S(z) + x S(z) S(-z) z')

S(-z) equals 1 - S(z), but keeps its digits where S(z) is close to 1; S(z) keeps its own where 1 + tanh would lose them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inweave.ops.common.precision import widened

#: z = x (LINEAR + CUBIC x^2)
LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR


def geglu(x: Tensor) -> Tensor:
    """Return y (rows, width) of x (rows, 2 * width)."""
    a, b = widened(x).chunk(2, -1)
    return (a * b * _share(b)).to(x.dtype)


def geglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x."""
    a, b = widened(x).chunk(2, -1)
    dy, share = widened(dy), _share(b)
    slope = share + b * torch.exp(-0.5 * b * b) / math.sqrt(2 * math.pi)
    return torch.cat((dy * b * share, dy * a * slope), -1).to(x.dtype)


def tanh_gelu(x: Tensor, left: Tensor | None) -> Tensor:
    """Return y (rows, width) of x (rows, width); or [left | y] (rows, columns of both), in new memory."""
    wide = widened(x)
    y = (wide * torch.sigmoid(wide * (LINEAR + CUBIC * wide * wide))).to(x.dtype)
    return y if left is None else torch.cat((left, y), -1)


def tanh_gelu_backward(dy: Tensor, x: Tensor, of_x: bool, of_left: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of left, in new memory; None for a gradient that is not requested."""
    columns = dy.shape[1] - x.shape[1]
    dleft = dy[:, :columns].clone(memory_format=torch.contiguous_format) if of_left else None
    if not of_x:
        return None, dleft
    wide, square = widened(x), widened(x).square()
    z = wide * (LINEAR + CUBIC * square)
    share = torch.sigmoid(z)
    slope = share + wide * share * torch.sigmoid(-z) * (LINEAR + 3 * CUBIC * square)
    return (widened(dy[:, columns:]) * slope).to(x.dtype), dleft


def _share(b: Tensor) -> Tensor:
    share: Tensor = 0.5 * torch.special.erfc(b * -math.sqrt(0.5))
    return share
