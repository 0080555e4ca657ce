"""GEGLU in plain torch, in float32 throughout; forward and backward as the kernels split them.

    a, b = the halves of the last axis of x
    y    = a * gelu(b)                 gelu(b) = b F(b),  F(b) = (1 + erf(b / sqrt 2)) / 2, not the one with tanh

    da = dy * gelu(b)
    db = dy * a * (F(b) + b f(b))      f(b) = exp(-b^2 / 2) / sqrt(2 pi)

`erf`'s complement is used where F is small: 1 + erf would lose all its digits there.
"""

from __future__ import annotations

import math

import torch


def geglu(x: torch.Tensor) -> torch.Tensor:
    """y (rows, width) of x (rows, 2 * width)."""
    a, b = _wide(x).chunk(2, -1)
    return (a * b * _share(b)).to(x.dtype)


def geglu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x."""
    a, b = _wide(x).chunk(2, -1)
    dy, share = _wide(dy), _share(b)
    slope = share + b * torch.exp(-0.5 * b * b) / math.sqrt(2 * math.pi)
    return torch.cat((dy * b * share, dy * a * slope), -1).to(x.dtype)


def _share(b: torch.Tensor) -> torch.Tensor:
    share: torch.Tensor = 0.5 * torch.special.erfc(b * -math.sqrt(0.5))
    return share


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
