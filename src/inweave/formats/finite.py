"""Checks for non-finite and nonzero numbers on the raw bits, without decoding.

A float is NaN or infinite exactly if all its exponent bits are set (8-bit E4M3: if all bits except the sign are set).
Data is read in chunks, so a file of any size needs only a few megabytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inweave.adapter import Tensor

CHUNK = 4 * 1024 * 1024

#: dtype -> (unsigned integer of its width, bits that are all set in a NaN or infinity)
_EXPONENT: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "C64": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
    "F8_E8M0": ("u1", 0xFF),
}


@dataclass(frozen=True, slots=True)
class ValueScan:
    """The result of scanning one tensor; ``zero`` is None if only a part of it was read."""

    nonfinite: int
    zero: bool | None


def scan(tensor: Tensor, *, limit: int | None = None) -> ValueScan:
    """Count non-finite numbers in a tensor, in its first ``limit`` bytes if given."""
    data = memoryview(tensor.data)
    partial = limit is not None and limit < len(data)
    if partial and limit is not None:
        data = data[: limit - limit % tensor.itemsize]
    kind = _EXPONENT.get(tensor.dtype)
    bad, zero = 0, True
    for start in range(0, len(data), CHUNK):
        piece = data[start : start + CHUNK]
        if kind is not None:
            width, mask = kind
            bits = np.frombuffer(piece, dtype=width)
            nonfinite = (bits & bits.dtype.type(mask)) == mask
            if tensor.dtype == "C64":
                nonfinite = nonfinite.reshape(-1, 2).any(axis=1)
            bad += int(np.count_nonzero(nonfinite))
        elif tensor.dtype.endswith("FNUZ"):
            bits = np.frombuffer(piece, dtype="u1")
            bad += int(np.count_nonzero(bits == 0x80))
        if zero and tensor.dtype == "F8_E8M0":
            zero = len(piece) == 0  # the format has no zero
        elif zero:
            zero = not np.frombuffer(piece, dtype="u1").any() or _signed_zeros(piece, tensor.dtype)
    return ValueScan(bad, None if partial else zero)


def _signed_zeros(piece: memoryview, dtype: str) -> bool:
    kind = _EXPONENT.get(dtype)
    if kind is None or dtype == "F8_E8M0":
        return False
    bits = np.frombuffer(piece, dtype=kind[0])
    return not (bits & bits.dtype.type((1 << (8 * bits.dtype.itemsize - 1)) - 1)).any()
