"""GGUF files: the name, shape, type and place of each tensor, from the header alone.

    magic, version, counts    metadata (key, type, value)    tensors (name, axes, the last first, type, offset)    data

Numbers are in blocks along the last axis. `TYPES` are the types that `inweave.ops.quantized.gguf` decodes. Offsets
count from the first multiple of the alignment after the header, so a longer header moves no tensor (`with_text`).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from inweave.errors import FormatError
from inweave.files.reading import open_regular

Shape = tuple[int, ...]
MAGIC = b"GGUF"
#: name -> (numbers of a block, its bytes)
TYPES: Mapping[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}  # fmt: skip
_NUMBERS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_ORIGINAL = "comfy.gguf.orig_shape."  # where a converter flattened a weight of more than two axes
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST = 1_000_000  # tensors, values of an array
_MOST_AXES = 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """``type``: a name of ggml; ``begin``: the place of the data in the file."""

    shape: Shape
    type: str
    begin: int

    @property
    def size(self) -> int:
        """The bytes of the data; 0 for a type that is not in `TYPES`."""
        block, size = TYPES.get(self.type, (1, 0))
        return math.prod(self.shape) // block * size


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """``texts``: metadata that are strings; ``data``: where the first tensor could begin.

    ``values``: name -> where a value is, with its name; ``listing``: where the tensors are listed; as (begin, end).
    """

    tensors: Mapping[str, GgufTensor]
    texts: Mapping[str, str]
    values: Mapping[str, tuple[int, int]]
    listing: tuple[int, int]
    alignment: int
    data: int


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as GGUF files do."""
    with open_regular(path) as file:
        return file.read(4) == MAGIC


def read_gguf(path: Path) -> GgufHeader:
    """Return the header of a GGUF file; raise FormatError if it is broken."""
    try:
        with open_regular(path) as file:
            return _Reader(file).header()
    except (struct.error, UnicodeDecodeError, OverflowError, ValueError) as error:
        raise FormatError(f"{path}: a GGUF file with a broken header ({error})") from None


def with_text(path: Path, header: GgufHeader, name: str, text: str) -> bytes:
    """Return all bytes before the tensors of a file, with a string among its metadata, in place of one of this name."""
    with open_regular(path) as file:
        raw = file.read(header.listing[1])
    if len(raw) < header.listing[1]:
        raise FormatError(f"{path}: changed on disk since it was opened")
    start = len(MAGIC) + 20
    version, tensors, values = struct.unpack_from("<IQQ", raw, len(MAGIC))
    begin, end = header.values.get(name, (header.listing[0],) * 2)
    key, content = (struct.pack("<Q", len(each)) + each for each in (name.encode(), text.encode()))
    counts = MAGIC + struct.pack("<IQQ", version, tensors, values + (name not in header.values))
    added = key + struct.pack("<I", _STRING) + content
    whole = counts + raw[start:begin] + added + raw[end : header.listing[1]]
    return whole + b"\0" * (-len(whole) % header.alignment)


class _Reader:
    """The header of a GGUF file, read in order; every length is compared with the file's."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = os.fstat(file.fileno()).st_size

    def header(self) -> GgufHeader:
        self.take(4)
        (version,) = self.unpack("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 are known")
        tensors, values = self.unpack("QQ")
        if max(tensors, values) > _MOST:
            raise ValueError(f"{tensors:,} tensors and {values:,} values")
        original: dict[str, Shape] = {}
        texts: dict[str, str] = {}
        places: dict[str, tuple[int, int]] = {}
        alignment = 32
        for _ in range(values):
            begin, name = self.file.tell(), self.text()
            value = self.value(self.unpack("I")[0])
            places[name] = begin, self.file.tell()
            if name.startswith(_ORIGINAL) and isinstance(value, list):
                if not 0 < len(value) <= _MOST_AXES or min(value) < 1:
                    raise ValueError(f"{name[:80]}: {value[:_MOST_AXES]} of {len(value)} axes is not a shape")
                original[name.removeprefix(_ORIGINAL)] = tuple(value)
            elif name == "general.alignment" and isinstance(value, int):
                alignment = value
            elif isinstance(value, str):
                texts[name] = value
        if not 0 < alignment <= 1 << 20:
            raise ValueError(f"an alignment of {alignment} bytes")
        after, rows = self.file.tell(), dict[str, tuple[Shape, int, int]]()
        for _ in range(tensors):
            name = self.text()
            (axes,) = self.unpack("I")
            if axes > _MOST_AXES:
                raise ValueError(f"{name[:80]}: {axes} axes")
            shape = tuple(reversed(self.unpack(f"{axes}Q")))
            if math.prod(filter(None, shape)) >= 1 << 63:  # also with an axis of 0, where the data has no bytes
                raise ValueError(f"{name[:80]}: a tensor of {list(shape)}")
            kind, offset = self.unpack("IQ")
            stated = original.get(name, shape)
            rows[name] = (stated if math.prod(stated) == math.prod(shape) else shape, kind, offset)
        end = self.file.tell()
        data = -(-end // alignment) * alignment
        listed = {
            name: GgufTensor(shape, _NUMBERS.get(kind, f"type {kind}"), data + offset)
            for name, (shape, kind, offset) in rows.items()
        }
        return GgufHeader(listed, texts, places, (after, end), alignment, data)

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise ValueError("it ends early")
        return self.file.read(count)

    def unpack(self, form: str) -> tuple[int, ...]:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def text(self) -> str:
        return self.take(self.unpack("Q")[0]).decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> object:
        """Return a value; of arrays, those of whole numbers, and None for others."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.unpack(_SCALARS[kind])[0] if kind in _SCALARS else self._unknown(kind)
        item, count = self.unpack("IQ")
        if count > _MOST or depth > 2:
            raise ValueError(f"an array of {count:,} values")
        if item in (4, 5):
            return list(self.unpack(f"{count}{'I' if item == 4 else 'i'}"))
        for _ in range(count):
            self.value(item, depth + 1)
        return None

    def _unknown(self, kind: int) -> object:
        raise ValueError(f"a value of the unknown type {kind}")
