"""Rows in e4m3, with one scale each.

    scale_i = max_k |x_ik| / 448              448: the largest number of e4m3
    q_ik    = e4m3(x_ik * (448 / max_k |x_ik|))        x_ik ~ q_ik * scale_i

e4m3 has 4 significant bits, so |x - q * scale| <= |x| / 16 down to its smallest normal number, 2**-6, and half of its
smallest step, 2**-10 * scale, below. A row of zeros stays zero. A row with a number that is not finite becomes NaN, so
that the error shows in the result.

Both quotients are those of float32, rounded to nearest, in every implementation: torch and compilers multiply with
reciprocals, and Triton's quotients have an error of 2 ulp. In float64 that is an error of at most 2**-52, and every
quotient of these numbers is at least 2**-49 away from the middle of two float32 numbers: rounding it to float32 gives
the exact result.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
WIDEST = 16384  # numbers of a row that one program of a kernel can hold
#: a row whose numbers are all smaller becomes zero: its scale would not be a normal float32 number
SMALLEST = 2.0**-100


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (e4m3, scales): the shape (M, K) of x, and (M, 1) in float32."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp_min(SMALLEST).double()
    return (wide * (LARGEST / largest).float()).to(torch.float8_e4m3fn), (largest / LARGEST).float()
