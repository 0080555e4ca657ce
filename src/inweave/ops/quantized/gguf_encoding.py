"""Float32 numbers to the blocks of GGUF files, in the layouts of `inweave.ops.quantized.gguf`.

    Q4_0, Q5_0    d = the number of the largest magnitude / -8 or -16, so that it is stored exactly
    Q8_0          d = the largest magnitude / 127
    Q4_1, Q5_1    d = (largest - smallest) / 15 or 31, m = the smallest
    Q4_K, Q5_K    the same for 32 numbers, with m <= 0; their scales are multiples of d, at most 63 of them
    Q6_K          as Q4_0 for 16 numbers, with -32; their scales are multiples of d, at most 127 of them

Numbers are rounded to the nearest multiple of the scale that is stored. ggml searches for better scales in K blocks:
its files are closer to their originals than what is encoded here. Where a block replaces another one (`encoded_like`),
the old scales are kept if the numbers are closer with them: those that did not change then keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inweave.ops.quantized.gguf import dequantized_blocks, scales_and_least


class _Encoder(NamedTuple):
    """``scales``: numbers -> bytes; ``codes``: numbers and these bytes -> bytes; ``last``: the scales come last."""

    scales: Callable[[Tensor], Tensor]
    codes: Callable[[Tensor, Tensor], Tensor]
    scale_bytes: int
    last: bool = False


def encoded_blocks(type: str, blocks: Tensor) -> Tensor:
    """Return (blocks, bytes of one) for (blocks, numbers of one)."""
    return _with_scales(ENCODERS[type], blocks, ENCODERS[type].scales(blocks))


def encoded_like(type: str, blocks: Tensor, old: Tensor) -> Tensor:
    """Return the same for numbers in place of others, whose blocks are ``old``: each with the better of two scales."""
    encoder = ENCODERS[type]
    place = slice(-encoder.scale_bytes, None) if encoder.last else slice(encoder.scale_bytes)
    choices = _with_scales(encoder, blocks, old[:, place]), encoded_blocks(type, blocks)
    errors = [(dequantized_blocks(type, raw).view_as(blocks) - blocks).square().sum(1) for raw in choices]
    return torch.where((errors[0] <= errors[1]).unsqueeze(1), *choices)


def _with_scales(encoder: _Encoder, blocks: Tensor, scales: Tensor) -> Tensor:
    codes = encoder.codes(blocks, scales)
    return torch.cat([codes, scales] if encoder.last else [scales, codes], 1)


def _bytes_of(*floats: Tensor) -> Tensor:
    """Return 16-bit floats (blocks, 1) as bytes (blocks, 2 each)."""
    return torch.cat([each.half().view(torch.uint8) for each in floats], 1)


def _floats(scales: Tensor) -> tuple[Tensor, ...]:
    """Return the 16-bit floats in bytes, (blocks, 1) each."""
    floats: Tensor = scales.contiguous().view(torch.float16).float()
    return floats.unsqueeze(2).unbind(1)


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


def _in_bytes(codes: Tensor, bits: int) -> Tensor:
    """Return codes of four or five bits of a block of 32: the fifth bits come first."""
    if bits == 4:
        return _halves(codes, 16)
    fifth = _together((codes >> 4).view(len(codes), 4, 8).transpose(1, 2), 1)
    return torch.cat([fifth, _halves(codes & 15, 16)], 1)


def _symmetric(bits: int) -> _Encoder:
    """Codes are numbers / d + half of their range."""
    half = 1 << (bits - 1)

    def scales(numbers: Tensor) -> Tensor:
        return _bytes_of(numbers.gather(1, numbers.abs().argmax(1, keepdim=True)) / -half)

    def codes(numbers: Tensor, stored: Tensor) -> Tensor:
        (d,) = _floats(stored)
        return _in_bytes((_quotients(numbers, d, -half, half - 1) + half).to(torch.uint8), bits)

    return _Encoder(scales, codes, 2)


def _from_least(bits: int) -> _Encoder:
    """Codes are (numbers - m) / d."""
    most = (1 << bits) - 1

    def scales(numbers: Tensor) -> Tensor:
        least, largest = numbers.aminmax(dim=1, keepdim=True)
        return _bytes_of((largest - least) / most, least)

    def codes(numbers: Tensor, stored: Tensor) -> Tensor:
        d, m = _floats(stored)
        return _in_bytes(_quotients(numbers - m, d, 0, most).to(torch.uint8), bits)

    return _Encoder(scales, codes, 4)


def _scales_q8_0(numbers: Tensor) -> Tensor:
    return _bytes_of(numbers.abs().amax(1, keepdim=True) / 127)


def _codes_q8_0(numbers: Tensor, stored: Tensor) -> Tensor:
    return _quotients(numbers, _floats(stored)[0], -127, 127).to(torch.int8).view(torch.uint8)


def _multiples(scales: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return (bytes of d, whole multiples of it) of the scales in a block."""
    stored = _bytes_of(scales.abs().amax(1, keepdim=True) / most)
    return stored, _quotients(scales, _floats(stored)[0], -most, most).to(torch.int8).view(torch.uint8)


def _with_least(bits: int) -> _Encoder:
    """Codes are (numbers + m) / d for 32 numbers of 256; d and m are multiples, of 6 bits each."""
    most = (1 << bits) - 1

    def scales(numbers: Tensor) -> Tensor:
        groups = numbers.view(-1, 8, 32)
        least = groups.amin(2).clamp_max(0)
        d, multiples = _multiples((groups.amax(2) - least) / most, 63)
        m, offsets = _multiples(-least, 63)
        first, second = (each[:, :4] | (each[:, 4:] >> 4) << 6 for each in (multiples, offsets))
        last = multiples[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4
        return torch.cat([d, m, first, second, last], 1)

    def codes(numbers: Tensor, stored: Tensor) -> Tensor:
        d, m = _floats(stored[:, :4])
        multiples, offsets = scales_and_least(stored[:, 4:])
        wide, below = (d * multiples).unsqueeze(2), (m * offsets).unsqueeze(2)
        rounded = _quotients(numbers.view(-1, 8, 32) + below, wide, 0, most).to(torch.uint8).flatten(1)
        if bits == 4:
            return _halves(rounded, 32)
        return torch.cat([_together((rounded >> 4).view(-1, 8, 32), 1), _halves(rounded & 15, 32)], 1)

    return _Encoder(scales, codes, 16)


def _scales_q6_k(numbers: Tensor) -> Tensor:
    groups = numbers.view(-1, 16, 16)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
    d, multiples = _multiples(extreme / -32, 127)
    return torch.cat([multiples, d], 1)


def _codes_q6_k(numbers: Tensor, stored: Tensor) -> Tensor:
    wide = _floats(stored[:, 16:])[0] * stored[:, :16].contiguous().view(torch.int8)
    rounded = _quotients(numbers.view(-1, 16, 16), wide.unsqueeze(2), -32, 31) + 32
    codes = rounded.to(torch.uint8).flatten(1)
    high = _together((codes >> 4).view(-1, 4, 32), 2).view(len(codes), -1)
    return torch.cat([_halves(codes & 15, 64), high], 1)


ENCODERS: dict[str, _Encoder] = {
    "Q4_0": _symmetric(4), "Q4_1": _from_least(4), "Q5_0": _symmetric(5), "Q5_1": _from_least(5),
    "Q8_0": _Encoder(_scales_q8_0, _codes_q8_0, 2), "Q4_K": _with_least(4), "Q5_K": _with_least(5),
    "Q6_K": _Encoder(_scales_q6_k, _codes_q6_k, 18, last=True),
}  # fmt: skip
