"""A tensor as it lies in a file: a dtype name, a shape and the raw little-endian bytes.

Nothing here decodes more than one number. Whoever needs arithmetic decodes the bytes with the
library it computes with; reading, checking and converting never do.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

FLOATS = frozenset(name for name in BITS if name.startswith(("F", "BF")))

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

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return BITS[self.dtype] // 8

    def item(self) -> float:
        """The only element, as a float; the stored value, never a repaired one."""
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

    def ints(self) -> tuple[int, ...]:
        """All elements of a small integer tensor."""
        code = _STRUCT[self.dtype]
        return tuple(int(value) for (value,) in struct.iter_unpack(code, bytes(self.data)))

    def rows(self, start: int, length: int) -> Tensor:
        """Rows ``start .. start+length`` of the first axis: a view, nothing is copied."""
        stride = len(self.data) // self.shape[0] if self.shape[0] else 0
        view = memoryview(self.data)[start * stride : (start + length) * stride]
        return Tensor(self.dtype, (length, *self.shape[1:]), view)

    def reshaped(self, shape: Sequence[int]) -> Tensor:
        if math.prod(shape) != self.numel:
            raise ValueError(f"cannot view {self.shape} as {tuple(shape)}")
        return Tensor(self.dtype, tuple(shape), self.data)

    def same(self, other: Tensor) -> bool:
        """Equal in dtype, shape and every bit (NaN equals the same NaN)."""
        return self.dtype == other.dtype and self.shape == other.shape and bytes(self.data) == bytes(other.data)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Concatenation along the first axis."""
    first = parts[0]
    if any(p.dtype != first.dtype or p.shape[1:] != first.shape[1:] for p in parts):
        raise ValueError(f"cannot stack {[(p.dtype, p.shape) for p in parts]}")
    data = b"".join(bytes(p.data) for p in parts)
    return Tensor(first.dtype, (sum(p.shape[0] for p in parts), *first.shape[1:]), data)


def scalar(value: float, dtype: str = "F32", shape: tuple[int, ...] = ()) -> Tensor:
    """A one-element tensor. Raises ValueError where ``dtype`` cannot hold ``value`` exactly."""
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


def _float8(code: int, exponent_bits: int) -> float:
    """OCP 8-bit floats: E4M3 has no infinity and one NaN pattern, E5M2 follows IEEE 754."""
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
