"""GEGLU and the tanh GELU as one kernel each way: formulas of `reference`, a program computes a part of a row.

F in float32 is torch's own, (1 + erf) / 2. Its two polynomial branches take longer than the memory traffic of 16 bits,
so 16-bit results use the approximation of Hastings (Abramowitz and Stegun, 7.1.26), whose exponential the gradient
needs too:

    F(b) = q e / 2  for b < 0,  1 - q e / 2  otherwise
    e = exp(-b^2 / 2),  q a polynomial in t = 1 / (1 + p |b| / sqrt 2)

Its error is at most 8e-8, and it keeps its digits where 1 + erf has none left.

The tanh GELU is computed without tanh, for which a GPU has two branches. In float32, S(z) and S(-z) are r and e r, by
the sign of z, with

    e = exp(-|z|),  r = 1 / (1 + e)

16 bits need no digits of S(-z) close to 0, so it is 1 - S(z), and exp(-z) is a power of two, with log2(e) in the
factors of z. If the result has another matrix on its left, programs of the same launch copy that matrix, and its
gradient out of the columns of the wider gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inweave.ops.common.exponential import exact_exp

_BLOCK = 1024
#: of the tanh GELU, which reads half as much per number: two loads of 16 bytes per thread in 16 bits
_GELU_BLOCK = 2048
_GELU_WARPS = 4


@triton.jit
def _share_and_exponential(b, EXACT: tl.constexpr):
    """Return (F(b), exp(-b^2 / 2))."""
    if EXACT:
        share = 0.5 * (1.0 + tl.erf(b * 0.7071067811865476))
        e = exact_exp(-0.5 * b * b)
    else:
        e = tl.exp(-0.5 * b * b)
        t = 1.0 / (1.0 + tl.abs(b) * 0.231641888)
        q = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
        tail = 0.5 * (q * e)
        share = tl.where(b < 0.0, tail, 1.0 - tail)
    return share, e


@triton.jit
def _geglu_kernel(x, y, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = x + row * 2 * width + column
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    share, _ = _share_and_exponential(b, y.dtype.element_ty == tl.float32)
    tl.store(y + row * width + column, (a * (b * share)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _geglu_gradient_kernel(dy, x, dx, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = row * 2 * width + column
    a = tl.load(x + start, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + start + width, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share, e = _share_and_exponential(b, dx.dtype.element_ty == tl.float32)
    slope = share + b * (e * 0.3989422804014327)
    tl.store(dx + start, (g * (b * share)).to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + start + width, (g * a * slope).to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid_and_slope(x, square, EXACT: tl.constexpr):
    """Return (S(z), S(z) S(-z))."""
    if EXACT:
        e = exact_exp(-tl.abs(x) * (1.5957691216057308 + 0.07135481627260025 * square))
        r = tl.div_rn(1.0, 1.0 + e)
        q = e * r
        share = tl.where(x < 0.0, q, r)
        slope = q * r
    else:
        share = 1.0 / (1.0 + tl.exp2(x * (-2.302208198144325 - 0.1029432395800235 * square)))
        slope = share - share * share
    return share, slope


@triton.jit
def gelu_and_slope(x, EXACT: tl.constexpr):
    """Return (gelu(x), its derivative); ``EXACT``: for results in float32."""
    square = x * x
    share, slope = _sigmoid_and_slope(x, square, EXACT)
    return x * share, share + (x * slope) * (1.5957691216057308 + 0.21406444881780073 * square)


@triton.jit
def _tanh_gelu_kernel(
    x, left, y, width, left_width, BLOCKS: tl.constexpr, LEFT_BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    column = tl.arange(0, BLOCK)
    to = y + row * (left_width + width)
    if block < LEFT_BLOCKS:
        column += block * BLOCK
        copied = tl.load(left + row * left_width + column, mask=column < left_width, other=0.0)
        tl.store(to + column, copied, mask=column < left_width)
    else:
        column += (block - LEFT_BLOCKS) * BLOCK
        n = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        value, _ = gelu_and_slope(n, y.dtype.element_ty == tl.float32)
        tl.store(to + left_width + column, value.to(y.dtype.element_ty), mask=column < width)


@triton.jit
def _tanh_gelu_gradient_kernel(
    dy, x, dx, dleft, width, left_width,
    BLOCKS: tl.constexpr, FIRST_BLOCK: tl.constexpr, LEFT_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS + FIRST_BLOCK
    column = tl.arange(0, BLOCK)
    source = dy + row * (left_width + width)
    if block < LEFT_BLOCKS:
        column += block * BLOCK
        copied = tl.load(source + column, mask=column < left_width, other=0.0)
        tl.store(dleft + row * left_width + column, copied, mask=column < left_width)
    else:
        column += (block - LEFT_BLOCKS) * BLOCK
        n = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        g = tl.load(source + left_width + column, mask=column < width, other=0.0).to(tl.float32)
        _, slope = gelu_and_slope(n, dx.dtype.element_ty == tl.float32)
        tl.store(dx + row * width + column, (g * slope).to(dx.dtype.element_ty), mask=column < width)


def geglu(x: Tensor) -> Tensor:
    """Compute `reference.geglu` of a contiguous x."""
    rows, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, width)
    _geglu_kernel[(rows, -(-width // _BLOCK))](x, y, width, BLOCK=_BLOCK)
    return y


def geglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Compute `reference.geglu_backward` of contiguous tensors."""
    rows, width = dy.shape
    dx = torch.empty_like(x)
    _geglu_gradient_kernel[(rows, -(-width // _BLOCK))](dy, x, dx, width, BLOCK=_BLOCK)
    return dx


def tanh_gelu(x: Tensor, left: Tensor | None) -> Tensor:
    """Compute `reference.tanh_gelu` of contiguous tensors of one dtype."""
    rows, width = x.shape
    left_width = 0 if left is None else left.shape[1]
    y = x.new_empty(rows, left_width + width)
    left_blocks, blocks = _blocks(left_width, width)
    if y.numel():
        _tanh_gelu_kernel[(rows * blocks,)](
            x, x if left is None else left, y, width, left_width,
            BLOCKS=blocks, LEFT_BLOCKS=left_blocks, BLOCK=_GELU_BLOCK, num_warps=_GELU_WARPS,
        )  # fmt: skip
    return y


def tanh_gelu_backward(dy: Tensor, x: Tensor, of_x: bool, of_left: bool) -> tuple[Tensor | None, Tensor | None]:
    """Compute `reference.tanh_gelu_backward` of contiguous tensors of one dtype."""
    rows, width = x.shape
    left_width = dy.shape[1] - width
    dx = torch.empty_like(x) if of_x else None
    dleft = x.new_empty(rows, left_width) if of_left else None
    left_blocks, blocks = _blocks(left_width, width)
    first, last = 0 if of_left else left_blocks, blocks if of_x else left_blocks
    if rows and first < last:
        _tanh_gelu_gradient_kernel[(rows * (last - first),)](
            dy, x, dy if dx is None else dx, dy if dleft is None else dleft, width, left_width,  # dy: not written to
            BLOCKS=last - first, FIRST_BLOCK=first, LEFT_BLOCKS=left_blocks, BLOCK=_GELU_BLOCK, num_warps=_GELU_WARPS,
        )  # fmt: skip
    return dx, dleft


def _blocks(left_width: int, width: int) -> tuple[int, int]:
    """Return (programs of a row that copy the left matrix, all programs of a row)."""
    left = triton.cdiv(left_width, _GELU_BLOCK)
    return left, left + triton.cdiv(width, _GELU_BLOCK)
