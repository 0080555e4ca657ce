"""GEGLU as one kernel each way: formulas of `reference`, a program takes a part of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inweave.ops.exponential import exact_exp

_BLOCK = 1024


@triton.jit
def _share(b):
    """F(b); torch's own kernel has 1 + erf as well."""
    return 0.5 * (1.0 + tl.erf(b * 0.7071067811865476))


@triton.jit
def _geglu_kernel(x, y, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = x + row * 2 * width + column
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, (a * (b * _share(b))).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _geglu_gradient_kernel(dy, x, dx, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = row * 2 * width + column
    a = tl.load(x + start, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + start + width, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = _share(b)
    if dx.dtype.element_ty == tl.float32:
        density = exact_exp(-0.5 * b * b)
    else:
        density = tl.exp(-0.5 * b * b)
    slope = share + b * (density * 0.3989422804014327)
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
