"""The blocks of GGUF files, as ggml defines them, to float32.

    Q4_0, Q5_0, Q8_0      x = d q                          one 16-bit float for 32 numbers
    Q4_1, Q5_1            x = d q + m
    Q2_K, Q4_K, Q5_K      x = (d scale) q - (dmin least)   256 numbers; scales in 4 or 6 bits for 16 or 32 of them
    Q3_K, Q6_K            x = (d scale) q                  signed scales for 16 numbers

Bits of a number are split: the low four (or two) of several numbers share a byte, the high ones are in other bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: name -> (numbers of a block, its bytes)
SIZES = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}  # fmt: skip


def dequantized_blocks(type: str, raw: Tensor) -> Tensor:
    """Return the flat float32 numbers of whole blocks: ``raw`` (blocks, bytes of one) in uint8."""
    return _TYPES[type](raw).flatten()


def _half(raw: Tensor, at: int) -> Tensor:
    """Return the 16-bit float at a place of each block, (blocks, 1)."""
    return raw[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor, group: int) -> Tensor:
    """Return, for each run of ``group`` bytes, all low halves and then all high ones."""
    parts = raw.view(len(raw), -1, 1, group)
    return torch.cat([parts & 15, parts >> 4], 2).flatten(1).int()


def _bits(raw: Tensor, width: int) -> Tensor:
    """Return the runs of ``width`` bits of bytes (blocks, n): (blocks, 8 / width, n), the lowest first."""
    shifts = torch.arange(0, 8, width, device=raw.device, dtype=torch.uint8).view(1, -1, 1)
    return (raw.unsqueeze(1) >> shifts) & ((1 << width) - 1)


def _q4_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * (_nibbles(raw[:, 2:], 16) - 8)


def _q4_1(raw: Tensor) -> Tensor:
    return _half(raw, 0) * _nibbles(raw[:, 4:], 16) + _half(raw, 2)


def _fifth_bits(raw: Tensor) -> Tensor:
    """Return 32 bits of 4 bytes, times 16."""
    return _bits(raw, 1).transpose(1, 2).flatten(1).int() << 4


def _q5_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * ((_nibbles(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6])) - 16)


def _q5_1(raw: Tensor) -> Tensor:
    return _half(raw, 0) * (_nibbles(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8])) + _half(raw, 2)


def _q8_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * raw[:, 2:].contiguous().view(torch.int8).float()


def _grouped(scales: Tensor, numbers: Tensor) -> Tensor:
    """Return each group of numbers times its scale."""
    return scales.unsqueeze(2) * numbers.view(*scales.shape, -1)


def _q2_k(raw: Tensor) -> Tensor:
    scales, numbers = raw[:, :16], _bits(raw[:, 16:80].reshape(-1, 32), 2).view(len(raw), -1)
    least = _half(raw, 82) * (scales >> 4)
    return _grouped(_half(raw, 80) * (scales & 15), numbers) - least.unsqueeze(2)


def _q3_k(raw: Tensor) -> Tensor:
    low = _bits(raw[:, 32:96].reshape(-1, 32), 2).view(len(raw), -1)
    high = _bits(raw[:, :32], 1).flatten(1)
    packed = raw[:, 96:108]
    scales = _nibbles(packed[:, :8], 8) | _bits(packed[:, 8:], 2).flatten(1).int() << 4
    return _grouped(_half(raw, 108) * (scales - 32), (low | high << 2).int() - 4)


def scales_and_least(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight offsets of 6 bits each, from 12 bytes."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, last & 15 | (first >> 6) << 4], 1)
    return scales, torch.cat([second & 63, last >> 4 | (second >> 6) << 4], 1)


def _q4_k(raw: Tensor) -> Tensor:
    return _with_least(raw, _nibbles(raw[:, 16:], 32))


def _q5_k(raw: Tensor) -> Tensor:
    return _with_least(raw, _nibbles(raw[:, 48:], 32) | _bits(raw[:, 16:48], 1).flatten(1).int() << 4)


def _with_least(raw: Tensor, numbers: Tensor) -> Tensor:
    scales, least = scales_and_least(raw[:, 4:16])
    return _grouped(_half(raw, 0) * scales, numbers) - (_half(raw, 2) * least).unsqueeze(2)


def _q6_k(raw: Tensor) -> Tensor:
    low = _nibbles(raw[:, :128], 64)
    high = _bits(raw[:, 128:192].reshape(-1, 32), 2).view(len(raw), -1).int()
    scales = raw[:, 192:208].contiguous().view(torch.int8)
    return _grouped(_half(raw, 208) * scales, (low | high << 4) - 32)


def _bf16(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.bfloat16).float()


_TYPES: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda raw: raw.contiguous().view(torch.float32), "F16": lambda raw: _half(raw, 0), "BF16": _bf16,
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
