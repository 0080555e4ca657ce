"""The 8-bit AdamW step in plain torch: formulas and tables of `work`, on whole tensors."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from inweave.ops.adam8bit.work import BLOCK, code_book, middles


def quantize(values: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8, scales float32) of a flat float32 tensor."""
    blocks = _blocks(values)
    high, low = blocks.amax(1), blocks.amin(1)
    scales = torch.where(high >= -low, high, low)
    share = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    codes = torch.bucketize(share, middles(signed, values.device), out_int32=True)
    if not signed:
        codes = torch.maximum(codes, (share > 0).int())
    return codes.to(torch.uint8).reshape(-1)[: values.numel()], scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The float32 values of what `quantize` returned."""
    table = code_book(signed, codes.device)
    return (_blocks(table[codes.int()]) * scales[:, None]).reshape(-1)[: codes.numel()]


def step(
    values: torch.Tensor,
    grads: torch.Tensor,
    m_codes: torch.Tensor,
    m_scales: torch.Tensor,
    v_codes: torch.Tensor,
    v_scales: torch.Tensor,
    *,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    inverse: torch.Tensor,
    ok: torch.Tensor,
    grad_scale: torch.Tensor,
) -> None:
    """One step in place; ``inverse`` is `work.corrections`, the rest as in `dispatch.step`."""
    rate = lr if lr.dim() == 0 else lr.repeat_interleave(BLOCK)[: values.numel()]
    g = grads * grad_scale
    m = dequantize(m_codes, m_scales, signed=True) * beta1 + g * (1 - beta1)
    v = dequantize(v_codes, v_scales, signed=False) * beta2 + (g * g) * (1 - beta2)
    moved = m / (v.sqrt() * inverse[1] + epsilon) * (rate * inverse[0])
    new = (values * (1 - rate * weight_decay) - moved, *quantize(m, signed=True), *quantize(v, signed=False))
    accepted = ok != 0
    for old, made in zip((values, m_codes, m_scales, v_codes, v_scales), new, strict=True):
        torch.where(accepted, made, old, out=old)


def _blocks(flat: torch.Tensor) -> torch.Tensor:
    return pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
