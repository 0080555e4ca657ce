"""Stored bytes become the right numbers, without a copy where none is needed and without warnings."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Iterator

import pytest
import torch

from inweave.adapter.tensor import BITS, Tensor
from inweave.errors import FormatError
from inweave.ops.tensors.decode import TORCH, decode

FLOATS = (0.0, -1.5, 3.25, 1024.0, -0.0078125, 7.0)


@pytest.fixture
def every_warning() -> Iterator[None]:
    """torch gives the read-only warning once per process by default."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch.set_warn_always(before)


@pytest.mark.parametrize(
    ("dtype", "code", "values"),
    [
        ("BOOL", "?", (True, False, True, True, False, True)),
        ("U8", "B", (0, 1, 255, 3, 7, 128)),
        ("I8", "b", (0, 1, -128, 127, -7, 5)),
        ("U16", "H", (0, 1, 65535, 40000, 2, 3)),
        ("I16", "h", (0, 1, -32768, 32767, -2, 3)),
        ("U32", "I", (0, 1, 2**31, 2**32 - 256, 5, 6)),
        ("I32", "i", (0, 1, -(2**31), 2**24, -5, 6)),
        ("U64", "Q", (0, 1, 2**40, 2**63, 5, 6)),
        ("I64", "q", (0, 1, -(2**40), 2**52, -5, 6)),
        ("F16", "e", FLOATS),
        ("F32", "f", FLOATS),
        ("F64", "d", FLOATS),
    ],
)
def test_plain_dtypes(dtype: str, code: str, values: tuple[float, ...]) -> None:
    data = struct.pack(f"<6{code}", *values)
    for target in (torch.float32, torch.float64):
        result = decode(Tensor(dtype, (2, 3), data), dtype=target)
        assert result.dtype == target
        assert result.shape == (2, 3)
        assert result.flatten().tolist() == [float(v) for v in values]


def test_bf16_is_the_upper_half_of_f32() -> None:
    data = b"".join(struct.pack("<f", value)[2:] for value in FLOATS)
    assert decode(Tensor("BF16", (6,), data)).tolist() == list(FLOATS)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_every_8_bit_float(dtype: str) -> None:
    result = decode(Tensor(dtype, (256,), bytes(range(256)))).tolist()
    expected = [Tensor(dtype, (), bytes([code])).item() for code in range(256)]
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize(
    ("dtype", "codes", "values"),
    [
        ("F8_E8M0", (127, 130, 120), [1.0, 8.0, 2.0**-7]),
        ("F8_E4M3FNUZ", (0x40, 0x44, 0xC8), [1.0, 1.5, -2.0]),
        ("F8_E5M2FNUZ", (0x40, 0x42, 0xC4), [1.0, 1.5, -2.0]),
    ],
)
def test_rare_8_bit_floats(dtype: str, codes: tuple[int, ...], values: list[float]) -> None:
    assert decode(Tensor(dtype, (3,), bytes(codes))).tolist() == values


def test_8_bit_floats_reach_other_dtypes_and_keep_their_own() -> None:
    stored = Tensor("F8_E4M3", (3,), bytes([0x38, 0x3C, 0xC0]))
    for target in (torch.bfloat16, torch.float16, torch.float64):
        assert decode(stored, dtype=target).dtype == target
        assert decode(stored, dtype=target).tolist() == [1.0, 1.5, -2.0]
    own = decode(stored, dtype=torch.float8_e4m3fn)
    assert own.view(torch.uint8).tolist() == [0x38, 0x3C, 0xC0]


def test_complex_is_never_cut_to_its_real_part() -> None:
    stored = Tensor("C64", (1,), struct.pack("<2f", 1.0, 2.0))
    assert decode(stored, dtype=torch.complex64).tolist() == [1 + 2j]
    with pytest.raises(FormatError, match="C64"):
        decode(stored)


def test_every_dtype_of_the_format_is_known() -> None:
    assert TORCH.keys() == BITS.keys()
    assert all(TORCH[name].itemsize * 8 == bits for name, bits in BITS.items())


def test_a_writable_buffer_is_shared() -> None:
    buffer = bytearray(struct.pack("<4f", 1, 2, 3, 4))
    result = decode(Tensor("F32", (2, 2), memoryview(buffer)))
    struct.pack_into("<f", buffer, 4, 9.0)
    assert result.tolist() == [[1, 9], [3, 4]]


@pytest.mark.usefixtures("every_warning")
@pytest.mark.parametrize("dtype", ["F32", "F16", "U8"])
def test_a_read_only_buffer_is_copied_without_a_warning(dtype: str) -> None:
    width = BITS[dtype] // 8
    data = struct.pack({"F32": "<4f", "F16": "<4e", "U8": "<4B"}[dtype], 1, 2, 3, 4)
    for buffer in (data, memoryview(data), memoryview(b"\0" * width + data)[width:]):
        result = decode(Tensor(dtype, (4,), buffer))
        result[0] = 7
        assert result.tolist() == [7, 2, 3, 4]
    assert data[:width] == struct.pack({"F32": "<f", "F16": "<e", "U8": "<B"}[dtype], 1)


@pytest.mark.parametrize("start", [1, 2, 3])
def test_an_unaligned_buffer(start: int) -> None:
    buffer = bytearray(b"\xff" * start + struct.pack("<3f", 1, 2, 3))
    result = decode(Tensor("F32", (3,), memoryview(buffer)[start:]))
    assert result.tolist() == [1, 2, 3]
    assert result.data_ptr() % 4 == 0


@pytest.mark.usefixtures("every_warning")
def test_scalars_and_empty_tensors() -> None:
    scalar = decode(Tensor("BF16", (), b"\x20\x41"))
    assert scalar.shape == ()
    assert scalar.item() == 10.0
    for shape in ((0,), (0, 3), (2, 0, 4)):
        empty = decode(Tensor("F16", shape, b""))
        assert empty.shape == shape
        assert empty.dtype == torch.float32


def test_device() -> None:
    stored = Tensor("F32", (2,), bytes(8))
    assert decode(stored, device="cpu").device == torch.device("cpu")
    assert decode(stored, device="meta").is_meta


def test_errors_name_the_expected_and_the_actual_size() -> None:
    with pytest.raises(FormatError, match=r"shape \(2, 3\) must have 24 bytes, got 20"):
        decode(Tensor("F32", (2, 3), bytes(20)))
    with pytest.raises(FormatError, match="F4"):
        decode(Tensor("F4", (2,), bytes(1)))
