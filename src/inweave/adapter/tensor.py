"""A tensor as stored in a file: a dtype name, a shape and the raw little-endian bytes.

Only single numbers are decoded here. Code that needs arithmetic decodes the bytes with its own library; reading,
checking and converting never decode them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_STRUCT = {
    "BOOL": "<?", "U8": "<B", "I8": "<b", "U16": "<H", "I16": "<h", "U32": "<I", "I32": "<i",
    "U64": "<Q", "I64": "<q", "F16": "<e", "F32": "<f", "F64": "<d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """``data`` holds exactly the bytes of ``shape`` in ``dtype`` (safetensors' dtype names)."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {list(self.shape)})"

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle the bytes themselves: a view of a mapped file cannot be."""
        return Tensor, (self.dtype, self.shape, bytes(self.data))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return BITS[self.dtype] // 8

    def item(self) -> float:
        """Return the only element as a float, exactly as stored."""
        if self.numel != 1:
            raise ValueError(f"expected a single number, got shape {self.shape}")
        raw = bytes(self.data)
        if self.dtype in _STRUCT:
            return float(struct.unpack(_STRUCT[self.dtype], raw)[0])
        if self.dtype == "BF16":
            return float(struct.unpack("<f", b"\0\0" + raw)[0])
        if self.dtype == "F8_E8M0":
            return math.nan if raw[0] == 0xFF else math.ldexp(1.0, raw[0] - 127)
        if self.dtype in ("F8_E4M3", "F8_E5M2"):
            return _float8(raw[0], exponent_bits=4 if self.dtype == "F8_E4M3" else 5)
        raise ValueError(f"cannot read a scalar of dtype {self.dtype}")

    def number(self) -> float | None:
        """Return the only element, or None if there is not exactly one that can be read."""
        try:
            return self.item()
        except ValueError:
            return None

    def ints(self) -> tuple[int, ...]:
        """Return all elements of a small integer tensor."""
        code = _STRUCT[self.dtype]
        return tuple(int(value) for (value,) in struct.iter_unpack(code, bytes(self.data)))

    def int_range(self) -> tuple[int, int]:
        """Return the smallest and the largest element of an integer tensor, which may be large; (0, 0) without data."""
        view = memoryview(self.data).cast("B").cast(_STRUCT[self.dtype].strip("<"))  # type: ignore[call-overload]
        return (min(view), max(view)) if len(view) else (0, 0)

    def rows(self, start: int, length: int) -> Tensor:
        """Return rows ``start .. start+length`` of the first axis: a view, nothing is copied."""
        stride = len(self.data) // self.shape[0] if self.shape[0] else 0
        view = memoryview(self.data)[start * stride : (start + length) * stride]
        return Tensor(self.dtype, (length, *self.shape[1:]), view)

    def columns(self, start: int, width: int) -> Tensor:
        """Return some columns of a matrix, or of a convolution with a kernel of one, copied."""
        data, stride = memoryview(self.data), len(self.data) // self.shape[0]
        left, right = start * self.itemsize, (start + width) * self.itemsize
        pieces = b"".join(data[i + left : i + right] for i in range(0, len(data), stride))
        return Tensor(self.dtype, (self.shape[0], width, *self.shape[2:]), pieces)

    def is_zero_outside(self, start: int, width: int) -> bool:
        """Return whether all columns but these hold zero bits."""
        data, stride = memoryview(self.data), len(self.data) // self.shape[0]
        left, right = start * self.itemsize, (start + width) * self.itemsize
        before, after = bytes(left), bytes(stride - right)
        return all(
            data[i : i + left] == before and data[i + right : i + stride] == after for i in range(0, len(data), stride)
        )

    def zero_rows(self, count: int) -> Tensor:
        """Return a tensor of zeros with ``count`` rows like these."""
        return Tensor(self.dtype, (count, *self.shape[1:]), bytes(count * (len(self.data) // self.shape[0])))

    def halves_exchanged(self) -> Tensor:
        """Return the rows with their halves exchanged."""
        half = self.shape[0] // 2
        return stacked([self.rows(half, half), self.rows(0, half)])

    def reshaped(self, shape: Sequence[int]) -> Tensor:
        """Return the same bytes in another shape."""
        if math.prod(shape) != self.numel:
            raise ValueError(f"cannot view {self.shape} as {tuple(shape)}")
        return Tensor(self.dtype, tuple(shape), self.data)

    def same(self, other: Tensor) -> bool:
        """Return whether dtype, shape and every bit are equal (NaN equals the same NaN)."""
        return self.dtype == other.dtype and self.shape == other.shape and bytes(self.data) == bytes(other.data)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors concatenated along the first axis."""
    first = parts[0]
    if any(p.dtype != first.dtype or p.shape[1:] != first.shape[1:] for p in parts):
        raise ValueError(f"cannot stack {[(p.dtype, p.shape) for p in parts]}")
    data = b"".join(bytes(p.data) for p in parts)
    return Tensor(first.dtype, (sum(p.shape[0] for p in parts), *first.shape[1:]), data)


def scalar(value: float, dtype: str = "F32", shape: tuple[int, ...] = ()) -> Tensor:
    """Return a one-element tensor; raise ValueError if ``dtype`` cannot hold ``value`` exactly."""
    if dtype == "BF16":
        data = struct.pack("<f", value)[2:]
    elif dtype in ("F8_E4M3", "F8_E5M2"):
        data = _to_float8(value, exponent_bits=4 if dtype == "F8_E4M3" else 5)
    elif dtype.startswith("F"):
        data = struct.pack(_STRUCT[dtype], value)
    else:
        data = struct.pack(_STRUCT[dtype], int(value))
    tensor = Tensor(dtype, shape, data)
    if tensor.item() != value:
        raise ValueError(f"{dtype} cannot hold {value!r} exactly")
    return tensor


def scalar_like(value: float | None, like: Tensor | None) -> Tensor | None:
    """Return a one-element tensor of the same dtype and shape, or None if it cannot hold the number."""
    if value is None or like is None:
        return None
    try:
        return scalar(value, like.dtype, like.shape)
    except ValueError:
        return None


def int_list(values: Iterable[int]) -> Tensor:
    """Return whole numbers as an I64 vector."""
    numbers = list(values)
    return Tensor("I64", (len(numbers),), b"".join(n.to_bytes(8, "little", signed=True) for n in numbers))


def _float8(code: int, exponent_bits: int) -> float:
    """Decode an OCP 8-bit float: E4M3 has no infinity and one NaN pattern, E5M2 follows IEEE 754."""
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if exponent == (1 << exponent_bits) - 1:
        if exponent_bits == 5:
            return math.nan if mantissa else sign * math.inf
        if mantissa == 7:
            return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def _to_float8(value: float, exponent_bits: int) -> bytes:
    for code in range(256):
        if _float8(code, exponent_bits) == value:
            return bytes([code])
    raise ValueError(f"an 8-bit float cannot hold {value!r} exactly")
