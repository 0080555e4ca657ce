"""GEGLU as one kernel each way: formulas of `reference`, a program takes a part of a row.

F in float32 is torch's own, (1 + erf) / 2. Its two branches of polynomials take longer than a GPU's memory needs for 16 bits, so these
have the approximation of Hastings (Abramowitz and Stegun, 7.1.26), whose exponential the gradient needs as well:

    F(b) = q e / 2  for b < 0,  1 - q e / 2  otherwise         e = exp(-b^2 / 2),  q a polynomial in t = 1 / (1 + p |b| / sqrt 2)

It is off by 8e-8 at most, and keeps its digits where 1 + erf has none left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inweave.ops.exponential import exact_exp

_BLOCK = 1024


@triton.jit
def _share_and_exponential(b, EXACT: tl.constexpr):
    """(F(b), exp(-b^2 / 2))"""
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


def geglu(x: torch.Tensor) -> torch.Tensor:
    """As `reference.geglu`; x is contiguous."""
    rows, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, width)
    _geglu_kernel[(rows, -(-width // _BLOCK))](x, y, width, BLOCK=_BLOCK)
    return y


def geglu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As `reference.geglu_backward`; both are contiguous."""
    rows, width = dy.shape
    dx = torch.empty_like(x)
    _geglu_gradient_kernel[(rows, -(-width // _BLOCK))](dy, x, dx, width, BLOCK=_BLOCK)
    return dx
