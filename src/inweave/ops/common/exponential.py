"""exp in float32 for kernels, as exact as the C library's.

`tl.exp` rounds x * log2(e) before the power of two: an error of |x| units in the last place. Here

    k = round(x / ln 2)
    r = x - k * ln 2            in two parts, the first of them without rounding
    e^x = e^r * 2^k             |r| < 0.35: e^r by its series up to r^7, the next term is below 2^-27; 2^k by its bits

A GPU's own instruction for 2^x has an error of two units in the last place.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _power_of_two(k):
    """Return 2^k of whole numbers from -126 to 127."""
    return ((k.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exact_exp(x):
    """Return e^x, with the usual results for infinities and NaN."""
    x = tl.where(x > 104.0, 104.0, tl.where(x < -104.0, -104.0, x))  # beyond this, the result is infinite or 0
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    r = x - k * 0.693145751953125  # 15 bits of ln 2: the product is exact
    r = r - k * 1.428606765330187e-06
    y = r * (1.0 / 5040.0) + (1.0 / 720.0)
    y = y * r + (1.0 / 120.0)
    y = y * r + (1.0 / 24.0)
    y = y * r + (1.0 / 6.0)
    y = y * r + 0.5
    y = 1.0 + (r + r * (r * y))
    half = tl.floor(k * 0.5)  # 2^k alone may be out of range although the result is not
    return y * _power_of_two(half) * _power_of_two(k - half)
