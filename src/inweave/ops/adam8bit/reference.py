"""The 8-bit AdamW step: formula, tables, and its definition in plain torch on whole tensors.

    g = grad_scale * grad
    m = beta1 D(M) + (1 - beta1) g            v = beta2 D(V) + (1 - beta2) g^2
    x = (1 - lr weight_decay) x  -  lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
    M = Q(m),  V = Q(v)                       where ok is 0, none of x, M, V changes

Q works on blocks of 256 values. A block's scale is its value of largest magnitude, *with its sign*; a code is the
entry of a sorted table nearest to value / scale, ties to the lower. D(code) = table[code] * scale.

The tables are the dynamic tree of "8-Bit Approximations for Parallelism in Deep Learning" (arXiv 1511.04561) as
"8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861) uses it: decade i = 0..6 covers 10^(i-6) * [0.1, 1]
with the centers of 2^i equal parts (2^(i+1) where there is no sign), and 0 and 1 complete the 256:

    signed    0, 1, +-10^(i-6) (0.1 + 0.9 (k + 1/2) / 2^i)          -0.993 .. 1, smallest 5.5e-7
    unsigned  0, 1,   10^(i-6) (0.1 + 0.9 (k + 1/2) / 2^(i+1))           0 .. 1, smallest 3.25e-7

Two details matter:
- the signed table contains 1 but not -1. A scale with its sign makes the largest value exactly 1 either way, so
  Q(D(M)) = M; with a plain absmax, a block whose largest value is negative would shrink by 0.7 % at every step.
- a v above 0 never gets the code 0, which would divide the next m by epsilon alone as soon as a gradient vanishes, and
  by sqrt((1 - beta2) g^2) otherwise: 30 times too large a step at beta2 = 0.999.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

#: values that share a scale
BLOCK = 256


@cache
def code_book(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 float32 values of the dynamic tree, ascending."""
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        centers = [10.0 ** (decade - 6) * (0.1 + 0.9 * (k + 0.5) / parts) for k in range(parts)]
        values += centers
        if signed:
            values += [-center for center in centers]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def middles(signed: bool, device: torch.device) -> Tensor:
    """Return the 255 borders between neighboring codes: a code is the number of borders below the value."""
    book = code_book(signed, torch.device("cpu")).double()
    return ((book[1:] + book[:-1]) / 2).float().to(device)


def fresh(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (m_codes, m_scales, v_codes, v_scales) of ``size`` values before the first step: all zero."""
    zero = int((code_book(True, torch.device("cpu")) == 0).nonzero())
    blocks = -(-size // BLOCK)
    return (
        torch.full((size,), zero, dtype=torch.uint8, device=device),
        torch.zeros(blocks, device=device),
        torch.zeros(size, dtype=torch.uint8, device=device),
        torch.zeros(blocks, device=device),
    )


@cache  # unbounded: a captured graph keeps the address
def _constants(beta1: float, beta2: float, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor((beta1, beta2), dtype=torch.float64, device=device),
        torch.tensor((-1.0, -0.5), dtype=torch.float64, device=device),
    )


def corrections(count: Tensor, beta1: float, beta2: float) -> Tensor:
    """Return (1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t)) as float32 on count's device.

    Computed in float64: at t = 1 and beta2 = 0.999 the difference has four digits fewer than its terms.
    """
    betas, powers = _constants(beta1, beta2, count.device)
    return (1 - betas.pow(count)).pow(powers).float()


def quantize(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return (codes uint8, scales float32) of a flat float32 tensor."""
    blocks = _blocks(values)
    high, low = blocks.amax(1), blocks.amin(1)
    scales = torch.where(high >= -low, high, low)
    share = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    codes = torch.bucketize(share, middles(signed, values.device), out_int32=True)
    if not signed:
        codes = torch.maximum(codes, (share > 0).int())
    return codes.to(torch.uint8).reshape(-1)[: values.numel()], scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the float32 values of the results of `quantize`."""
    table = code_book(signed, codes.device)
    return (_blocks(table[codes.int()]) * scales[:, None]).reshape(-1)[: codes.numel()]


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
) -> None:
    """Take one step in place; ``inverse`` is from `corrections`, the rest as in `select.step`."""
    rate = lr if lr.dim() == 0 else lr.repeat_interleave(BLOCK)[: values.numel()]
    g = grads * grad_scale
    m = dequantize(m_codes, m_scales, signed=True) * beta1 + g * (1 - beta1)
    v = dequantize(v_codes, v_scales, signed=False) * beta2 + (g * g) * (1 - beta2)
    moved = m / (v.sqrt() * inverse[1] + epsilon) * (rate * inverse[0])
    new = (values * (1 - rate * weight_decay) - moved, *quantize(m, signed=True), *quantize(v, signed=False))
    accepted = ok != 0
    for old, made in zip((values, m_codes, m_scales, v_codes, v_scales), new, strict=True):
        torch.where(accepted, made, old, out=old)


def _blocks(flat: Tensor) -> Tensor:
    return pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
