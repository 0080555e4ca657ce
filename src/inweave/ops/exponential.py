"""exp in float32 for kernels, as exact as the C library's.

`tl.exp` rounds x * log2(e) before it is raised to: an error of |x| units of the last place. Here

    k = round(x / ln 2)
    r = x - k * ln 2            in two parts, the first of them without rounding
    e^x = 2^(r / ln 2) * 2^k
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exact_exp(x):
    """e^x; infinities and NaN as ever."""
    x = tl.where(x > 104.0, 104.0, tl.where(x < -104.0, -104.0, x))  # beyond, 2^k is infinite or 0 already
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    r = x - k * 0.693145751953125  # 15 bits of ln 2: the product is exact
    r = r - k * 1.428606765330187e-06
    half = tl.floor(k * 0.5)  # 2^k alone may leave the range that the result has
    return tl.exp2(r * 1.4426950408889634) * tl.exp2(half) * tl.exp2(k - half)
