"""Float32 numbers to the blocks of GGUF files, in the layouts of `inweave.ops.quantized.gguf`.

    Q4_0, Q5_0    d = the number of the largest magnitude / -8 or -16, so that it is stored exactly
    Q8_0          d = the largest magnitude / 127
    Q4_1, Q5_1    d = (largest - smallest) / 15 or 31, m = the smallest
    Q4_K, Q5_K    the same for 32 numbers, with m <= 0; their scales are multiples of d, at most 63 of them
    Q6_K          as Q4_0 for 16 numbers, with -32; their scales are multiples of d, at most 127 of them

Numbers are rounded to the nearest multiple of the scale that is stored. ggml searches for better scales in K blocks:
its files are closer to their originals than what is encoded here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def encoded_blocks(type: str, blocks: Tensor) -> Tensor:
    """Return (blocks, bytes of one) for (blocks, numbers of one)."""
    return ENCODERS[type](blocks)


def _bytes_of(*floats: Tensor) -> Tensor:
    """Return 16-bit floats (blocks, 1) as bytes (blocks, 2 each)."""
    return torch.cat([each.half().view(torch.uint8) for each in floats], 1)


def _quotients(numbers: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    """Return round(numbers / scales) within limits; 0 where the scale is 0. NaN and infinity remain in the scales."""
    divided = torch.where(scales != 0, numbers / scales, 0.0).nan_to_num(0.0)
    return divided.round().clamp(least, most)


def _halves(codes: Tensor, group: int) -> Tensor:
    """Return two codes of four bits in a byte: all low halves of a run of ``group`` bytes come before the high ones."""
    pairs = codes.view(len(codes), -1, 2, group)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def _together(parts: Tensor, width: int) -> Tensor:
    """Return (blocks, 8 / width, n) numbers of ``width`` bits in n bytes, the lowest first."""
    shifts = torch.arange(0, 8, width, device=parts.device, dtype=torch.uint8).view(1, -1, 1)
    return (parts << shifts).sum(1, dtype=torch.uint8)


def _symmetric(half: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bytes of d, codes), for codes that are numbers / d + half."""
    extreme = numbers.gather(1, numbers.abs().argmax(1, keepdim=True))
    scale = _bytes_of(extreme / -half)
    d = scale.view(torch.float16).float()
    return scale, (_quotients(numbers, d, -half, half - 1) + half).to(torch.uint8)


def _from_least(most: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bytes of d and m, codes)."""
    least, largest = numbers.aminmax(dim=1, keepdim=True)
    scales = _bytes_of((largest - least) / most, least)
    d, m = scales.view(torch.float16).float().chunk(2, 1)
    return scales, _quotients(numbers - m, d, 0, most).to(torch.uint8)


def _fifth_bits(codes: Tensor) -> Tensor:
    return _together((codes >> 4).view(len(codes), 4, 8).transpose(1, 2), 1)


def _q4_0(numbers: Tensor) -> Tensor:
    scale, codes = _symmetric(8, numbers)
    return torch.cat([scale, _halves(codes, 16)], 1)


def _q5_0(numbers: Tensor) -> Tensor:
    scale, codes = _symmetric(16, numbers)
    return torch.cat([scale, _fifth_bits(codes), _halves(codes & 15, 16)], 1)


def _q4_1(numbers: Tensor) -> Tensor:
    scales, codes = _from_least(15, numbers)
    return torch.cat([scales, _halves(codes, 16)], 1)


def _q5_1(numbers: Tensor) -> Tensor:
    scales, codes = _from_least(31, numbers)
    return torch.cat([scales, _fifth_bits(codes), _halves(codes & 15, 16)], 1)


def _q8_0(numbers: Tensor) -> Tensor:
    scale = _bytes_of(numbers.abs().amax(1, keepdim=True) / 127)
    codes = _quotients(numbers, scale.view(torch.float16).float(), -127, 127)
    return torch.cat([scale, codes.to(torch.int8).view(torch.uint8)], 1)


def _multiples(scales: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (bytes of d, whole multiples of it, the scales that these are) of the scales in a block."""
    stored = _bytes_of(scales.abs().amax(1, keepdim=True) / most)
    d = stored.view(torch.float16).float()
    whole = _quotients(scales, d, -most, most)
    return stored, whole.to(torch.int8).view(torch.uint8), whole * d


def _with_least(most: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the 16 bytes of scales of a K block, its codes)."""
    groups = numbers.view(-1, 8, 32)
    least = groups.amin(2).clamp_max(0)
    d, scales, wide = _multiples((groups.amax(2) - least) / most, 63)
    m, offsets, below = _multiples(-least, 63)
    codes = _quotients(groups + below.unsqueeze(2), wide.unsqueeze(2), 0, most).to(torch.uint8).flatten(1)
    first, second = (each[:, :4] | (each[:, 4:] >> 4) << 6 for each in (scales, offsets))
    last = scales[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4
    return torch.cat([d, m, first, second, last], 1), codes


def _q4_k(numbers: Tensor) -> Tensor:
    scales, codes = _with_least(15, numbers)
    return torch.cat([scales, _halves(codes, 32)], 1)


def _q5_k(numbers: Tensor) -> Tensor:
    scales, codes = _with_least(31, numbers)
    return torch.cat([scales, _together((codes >> 4).view(-1, 8, 32), 1), _halves(codes & 15, 32)], 1)


def _q6_k(numbers: Tensor) -> Tensor:
    groups = numbers.view(-1, 16, 16)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
    d, scales, wide = _multiples(extreme / -32, 127)
    codes = (_quotients(groups, wide.unsqueeze(2), -32, 31) + 32).to(torch.uint8).flatten(1)
    high = _together((codes >> 4).view(-1, 4, 32), 2).view(len(codes), -1)
    return torch.cat([_halves(codes & 15, 64), high, scales, d], 1)


ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip
