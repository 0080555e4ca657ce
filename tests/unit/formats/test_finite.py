"""NaN, infinity and zero are detected from the bits, exactly as torch and numpy detect them from the values."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from inweave.adapter import Tensor
from inweave.adapter.tensor import BITS
from inweave.formats.finite import CHUNK, ValueScan, scan

#: dtype -> patterns that are not finite, patterns that nearly are not
FLOATS = {name for name in BITS if name.startswith(("F", "BF"))}
PATTERNS: dict[str, tuple[list[bytes], list[bytes]]] = {
    "F64": (
        [struct.pack("<d", float(x)) for x in ("nan", "inf", "-inf")] + [struct.pack("<Q", 0x7FF0_0000_0000_0001)],
        [struct.pack("<d", x) for x in (1.7976931348623157e308, -1.7976931348623157e308, 5e-324, 1.0)],
    ),
    "F32": (
        [struct.pack("<f", float(x)) for x in ("nan", "inf", "-inf")] + [struct.pack("<I", 0xFF80_0001)],
        [struct.pack("<I", x) for x in (0x7F7F_FFFF, 0xFF7F_FFFF, 0x007F_FFFF, 1)],
    ),
    "F16": (
        [struct.pack("<H", x) for x in (0x7C00, 0xFC00, 0x7C01, 0xFFFF)],
        [struct.pack("<H", x) for x in (0x7BFF, 0xFBFF, 0x03FF, 1)],
    ),
    "BF16": (
        [struct.pack("<H", x) for x in (0x7F80, 0xFF80, 0x7F81, 0xFFFF)],
        [struct.pack("<H", x) for x in (0x7F7F, 0xFF7F, 0x007F, 0x7C00)],
    ),
    "F8_E4M3": ([b"\x7f", b"\xff"], [b"\x7e", b"\xfe", b"\x78", b"\x7c", b"\x01"]),
    "F8_E5M2": ([b"\x7c", b"\xfc", b"\x7d", b"\xff"], [b"\x7b", b"\xfb", b"\x03"]),
}


def test_every_float_of_adapters_is_here() -> None:
    assert set(PATTERNS) < FLOATS


@pytest.mark.parametrize("dtype", PATTERNS)
def test_at_the_borders_of_chunks(dtype: str) -> None:
    """First and last number of the file and of each chunk, and one beyond the last whole chunk."""
    bad, good = PATTERNS[dtype]
    width = BITS[dtype] // 8
    per_chunk = CHUNK // width
    count = 2 * per_chunk + 3
    indices = (0, 1, per_chunk - 1, per_chunk, 2 * per_chunk - 1, 2 * per_chunk, count - 1)
    base = bytearray(good[-1] * count)
    assert scan(Tensor(dtype, (count,), bytes(base))) == ValueScan(0, False)
    for number, index in enumerate(indices):
        data = memoryview(base)
        original = bytes(data[index * width : (index + 1) * width])
        data[index * width : (index + 1) * width] = bad[number % len(bad)]
        assert scan(Tensor(dtype, (count,), data.toreadonly())) == ValueScan(1, False), index
        data[index * width : (index + 1) * width] = original
    for number, index in enumerate(indices):
        base[index * width : (index + 1) * width] = bad[number % len(bad)]
    assert scan(Tensor(dtype, (count,), bytes(base))) == ValueScan(len(indices), False)


@pytest.mark.parametrize("dtype", PATTERNS)
def test_each_pattern(dtype: str) -> None:
    bad, good = PATTERNS[dtype]
    for pattern in bad:
        assert scan(Tensor(dtype, (3,), good[0] + pattern + good[0])) == ValueScan(1, False)
    for pattern in good:
        assert scan(Tensor(dtype, (3,), pattern * 3)) == ValueScan(0, False)
    assert scan(Tensor(dtype, (len(bad),), b"".join(bad))) == ValueScan(len(bad), False)


_TORCH = {
    "F16": (torch.float16, "<u2"),
    "BF16": (torch.bfloat16, "<u2"),
    "F8_E4M3": (torch.float8_e4m3fn, "u1"),
    "F8_E5M2": (torch.float8_e5m2, "u1"),
    "F8_E4M3FNUZ": (torch.float8_e4m3fnuz, "u1"),
    "F8_E5M2FNUZ": (torch.float8_e5m2fnuz, "u1"),
    "F8_E8M0": (torch.float8_e8m0fnu, "u1"),
}


@pytest.mark.parametrize("dtype", _TORCH)
def test_every_value_of_the_small_floats(dtype: str) -> None:
    """All 256 or 65,536 of them, one by one, against torch."""
    kind, unsigned = _TORCH[dtype]
    codes = np.arange(1 << BITS[dtype], dtype=np.uint32).astype(unsigned)
    values = torch.from_numpy(codes.view(unsigned.replace("u", "i"))).view(kind).to(torch.float32)
    finite, zero = torch.isfinite(values), values == 0
    assert scan(Tensor(dtype, (len(codes),), codes.tobytes())).nonfinite == int((~finite).sum())
    step = 1 if len(codes) == 256 else 61
    for code in range(0, len(codes), step):
        position = scan(Tensor(dtype, (1,), codes[code : code + 1].tobytes()))
        assert position == ValueScan(int(not finite[code]), bool(zero[code])), hex(code)


@pytest.mark.parametrize(("dtype", "kind"), [("F32", "<f4"), ("F64", "<f8"), ("F16", "<f2")])
def test_random_bits_against_numpy(dtype: str, kind: str) -> None:
    data = np.random.default_rng(3).bytes(1 << 18)
    expected = np.count_nonzero(~np.isfinite(np.frombuffer(data, kind)))
    assert expected > 0 or dtype == "F64"
    assert scan(Tensor(dtype, (len(data) * 8 // BITS[dtype],), data)).nonfinite == expected


@pytest.mark.parametrize("dtype", list(PATTERNS))
def test_zeros_of_either_sign(dtype: str) -> None:
    width = BITS[dtype] // 8
    minus = bytes(width - 1) + b"\x80"
    count = CHUNK // width + 2
    assert scan(Tensor(dtype, (count,), bytes(count * width))) == ValueScan(0, True)
    assert scan(Tensor(dtype, (count,), minus * count)) == ValueScan(0, True)
    assert scan(Tensor(dtype, (2,), minus + bytes(width))) == ValueScan(0, True)
    one = PATTERNS[dtype][1][-1]
    for data in (bytes(width * (count - 1)) + one, one + minus * (count - 1), minus * (count - 1) + one):
        assert scan(Tensor(dtype, (count,), data)) == ValueScan(0, False)


@pytest.mark.parametrize("dtype", [name for name in BITS if name not in FLOATS and name != "C64"])
def test_whole_numbers_are_always_finite(dtype: str) -> None:
    width = BITS[dtype] // 8
    assert scan(Tensor(dtype, (4,), b"\xff" * width * 4)) == ValueScan(0, False)
    assert scan(Tensor(dtype, (4,), bytes(width * 4))) == ValueScan(0, True)
    assert scan(Tensor(dtype, (1,), bytes(width - 1) + b"\x80")) == ValueScan(
        0, False
    )  # the least number, not minus zero


def test_nothing_to_look_at() -> None:
    assert scan(Tensor("F32", (0, 4), b"")) == ValueScan(0, True)


@pytest.mark.parametrize("dtype", PATTERNS)
def test_only_a_sample_is_read(dtype: str) -> None:
    """ValueScan beyond the limit are not scanned, and nothing is reported about zeros."""
    width = BITS[dtype] // 8
    bad = PATTERNS[dtype][0][0]
    data = bytes(15 * width) + bad
    assert scan(Tensor(dtype, (16,), data), limit=15 * width) == ValueScan(0, None)
    assert scan(Tensor(dtype, (16,), data), limit=16 * width) == ValueScan(1, False)
    assert scan(Tensor(dtype, (16,), data), limit=1 << 40) == ValueScan(1, False)
    assert scan(Tensor(dtype, (16,), bad + data[:-width]), limit=8 * width) == ValueScan(1, None)
    assert scan(Tensor(dtype, (16,), data), limit=0) == ValueScan(0, None)
