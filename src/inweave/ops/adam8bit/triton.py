"""The 8-bit AdamW step as one launch: a program computes the whole step of a few blocks of 256 in registers.

Per value: x, g and two codes are read, x and two codes are written: 16 bytes. Both tables stay in the L1 cache.

Requantizing is a binary search over the 255 borders between codes. Its first levels, where all values of a program
compare with the same few borders, are sums of comparisons with scalars instead of gathers:

    code = 2^(8-c) * #{k in 1 .. 2^c - 1 : border[k 2^(8-c) - 1] < x}, then one gather for each of the 8 - c bits left

Roots and quotients are the correctly rounded ones, so that codes agree with the reference; only contraction to fused
multiply-adds may move a value across a border, by one code.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from inweave.ops.adam8bit.reference import BLOCK, code_book, middles


@triton.jit
def _nearest(share, borders, COARSE: tl.constexpr):
    """Return the number of borders below each value."""
    code = tl.zeros_like(share).to(tl.int32)
    for k in tl.static_range(1, 1 << COARSE):
        code += (tl.load(borders + (k << (8 - COARSE)) - 1) < share).to(tl.int32)
    code = code << (8 - COARSE)
    for bit in tl.static_range(COARSE, 8):
        probe = code + (128 >> bit)
        code = tl.where(tl.load(borders + probe - 1) < share, probe, code)
    return code


@triton.jit
def _scale(moment):
    """Return the value of largest magnitude of every row, with its sign."""
    high = tl.max(moment, axis=1)
    low = tl.min(moment, axis=1)
    return tl.where(high >= -low, high, low)


@triton.jit
def _share(moment, scale):
    return tl.div_rn(moment, tl.broadcast_to(tl.where(scale == 0, 1.0, scale)[:, None], moment.shape))


@triton.jit
def _step_kernel(
    values, grads, m_codes, m_scales, v_codes, v_scales, m_book, v_book, m_borders, v_borders,
    lr_ptr,  # one number, or one per block
    inverse,  # (2,) float32: 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t)
    ok_ptr, grad_scale_ptr, size, blocks, beta1,
    rest1,  # 1 - beta1, rounded once
    beta2, rest2, epsilon, weight_decay,
    LR_PER_BLOCK: tl.constexpr, ROWS: tl.constexpr, COARSE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    if tl.load(ok_ptr) != 0:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        there = rows < blocks
        places = rows[:, None].to(tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
        inside = places < size

        g = tl.load(grads + places, mask=inside, other=0.0) * tl.load(grad_scale_ptr)
        x = tl.load(values + places, mask=inside, other=0.0)
        m_code = tl.load(m_codes + places, mask=inside, other=0).to(tl.int32)
        v_code = tl.load(v_codes + places, mask=inside, other=0).to(tl.int32)
        m = tl.load(m_book + m_code) * tl.load(m_scales + rows, mask=there, other=0.0)[:, None]
        v = tl.load(v_book + v_code) * tl.load(v_scales + rows, mask=there, other=0.0)[:, None]
        m = tl.where(inside, m * beta1 + g * rest1, 0.0)  # padding must not set the last block's scale
        v = v * beta2 + (g * g) * rest2

        if LR_PER_BLOCK:
            lr = tl.load(lr_ptr + rows, mask=there, other=0.0)[:, None]
        else:
            lr = tl.load(lr_ptr)
        moved = tl.div_rn(m, tl.sqrt_rn(v) * tl.load(inverse + 1) + epsilon) * (lr * tl.load(inverse))
        x = x * (1.0 - lr * weight_decay) - moved
        tl.store(values + places, x, mask=inside)

        m_scale = _scale(m)
        v_scale = tl.max(v, axis=1)
        v_share = _share(v, v_scale)
        m_new = _nearest(_share(m, m_scale), m_borders, COARSE)
        v_new = tl.maximum(_nearest(v_share, v_borders, COARSE), (v_share > 0).to(tl.int32))
        tl.store(m_codes + places, m_new.to(tl.uint8), mask=inside)
        tl.store(v_codes + places, v_new.to(tl.uint8), mask=inside)
        tl.store(m_scales + rows, m_scale, mask=there)
        tl.store(v_scales + rows, v_scale, mask=there)


def step(
    values: Tensor,
    grads: Tensor,
    m_codes: Tensor,
    m_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    *,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    inverse: Tensor,
    ok: Tensor,
    grad_scale: Tensor,
    rows: int = 4,
    warps: int = 4,
    coarse: int = 3,
) -> None:
    """Take one step in place; ``rows``, ``warps`` and ``coarse`` affect the launch, not the result."""
    blocks = m_scales.numel()
    if blocks == 0:
        return
    device = values.device
    _step_kernel[(triton.cdiv(blocks, rows),)](
        values, grads, m_codes, m_scales, v_codes, v_scales,
        code_book(True, device), code_book(False, device), middles(True, device), middles(False, device),
        lr, inverse, ok, grad_scale, values.numel(), blocks, beta1, 1 - beta1, beta2, 1 - beta2, epsilon, weight_decay,
        LR_PER_BLOCK=lr.dim() > 0, ROWS=rows, COARSE=coarse, WIDTH=BLOCK, num_warps=warps,
    )  # fmt: skip
