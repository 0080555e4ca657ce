"""Names and shapes of the weights in a base model's file, as the model has them, however they are packed.

    GGUF     name, axes (last first), type and offset of each tensor follow the metadata; data is never read
    nvfp4    two values in a byte: U8 [out, in / 2], beside weight_scale and weight_scale_2
    bnb      four-bit values in one column: U8 [n, 1], beside a JSON text that holds the shape (quant_state)
    SVDQuant other layers than the model's, fused and renamed (qweight, proj_down): refused by name

Files with packed weights can be checked against; `has_packed_weights` tells the files whose numbers cannot be changed.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from inweave.errors import FormatError
from inweave.files.reading import open_regular
from inweave.formats.files import read_header
from inweave.formats.gate import Span

Shape = tuple[int, ...]
_MAGIC = b"GGUF"
_ORIGINAL = "comfy.gguf.orig_shape."  # where a converter flattened a weight of more than two axes
_STATE = ".quant_state.bitsandbytes__"
_LONGEST_STATE = 4096
#: tensors beside a packed weight
_COMPANIONS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type of a value -> its bytes
_STRING, _ARRAY = 8, 9
_MOST = 1_000_000  # tensors, values of an array


def base_shapes(path: Path) -> dict[str, Shape]:
    """Return names and shapes of the weights in a safetensors or GGUF file; raise FormatError if it is neither."""
    if _is_gguf(path):
        return _read_gguf(path)
    header = read_header(path)
    if any(name.endswith((".qweight", ".wscales")) for name in header.spans):
        raise FormatError(
            f"{path}: a checkpoint of Nunchaku (SVDQuant), whose layers are fused and renamed: name the model that it "
            "was made from instead, such as flux1-dev"
        )
    shapes: dict[str, Shape] = {}
    for name, span in header.spans.items():
        module = name.removesuffix(".weight")
        if name.endswith(_COMPANIONS) or _STATE in name:
            continue
        state = next((s for kind in ("nf4", "fp4") if (s := header.spans.get(f"{name}{_STATE}{kind}"))), None)
        if state is not None:
            shapes[name] = _stated_shape(path, header.data_start, state, span)
        elif _is_nvfp4(header.spans, module, span):
            shapes[name] = (span.shape[0], span.shape[1] * 2)
        else:
            shapes[name] = span.shape
    return shapes


def has_packed_weights(path: Path) -> bool:
    """Return whether some weights of a file are packed, so that no change can be added to their numbers."""
    if _is_gguf(path):
        return True
    spans = read_header(path).spans
    return any(_STATE in name or _is_nvfp4(spans, name.removesuffix(".weight"), spans[name]) for name in spans)


def _is_nvfp4(spans: Mapping[str, Span], module: str, span: Span) -> bool:
    scales = f"{module}.weight_scale" in spans and f"{module}.weight_scale_2" in spans
    return span.dtype == "U8" and len(span.shape) == 2 and scales


def _stated_shape(path: Path, start: int, state: Span, weight: Span) -> Shape:
    """Return the shape in a weight's quantization state; raise FormatError if it is not that of the packed values."""
    with open_regular(path) as file:
        file.seek(start + state.begin)
        text = file.read(min(state.end - state.begin, _LONGEST_STATE))
    try:
        shape = tuple(int(size) for size in json.loads(text)["shape"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise FormatError(f"{path}: the quantization state of a weight is not bitsandbytes' JSON") from None
    if any(size < 1 for size in shape) or (math.prod(shape) + 1) // 2 != math.prod(weight.shape):
        raise FormatError(f"{path}: a weight of {list(shape)} cannot be packed into {list(weight.shape)} bytes")
    return shape


def _is_gguf(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(4) == _MAGIC


def _read_gguf(path: Path) -> dict[str, Shape]:
    try:
        with open_regular(path) as file:
            return _Reader(file).shapes()
    except (struct.error, UnicodeDecodeError, OverflowError, ValueError) as error:
        raise FormatError(f"{path}: a GGUF file with a broken header ({error})") from None


class _Reader:
    """The header of a GGUF file, read in order; every length is compared with the file's."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = os.fstat(file.fileno()).st_size

    def shapes(self) -> dict[str, Shape]:
        self.take(4)
        (version,) = self.unpack("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 are known")
        tensors, values = self.unpack("QQ")
        if max(tensors, values) > _MOST:
            raise ValueError(f"{tensors:,} tensors and {values:,} values")
        original: dict[str, Shape] = {}
        for _ in range(values):
            name = self.text()
            value = self.value(self.unpack("I")[0])
            if name.startswith(_ORIGINAL) and isinstance(value, list):
                original[name.removeprefix(_ORIGINAL)] = tuple(value)
        shapes: dict[str, Shape] = {}
        for _ in range(tensors):
            name = self.text()
            (axes,) = self.unpack("I")
            if axes > 8:
                raise ValueError(f"{name[:80]}: {axes} axes")
            shape = tuple(reversed(self.unpack(f"{axes}Q")))
            self.unpack("IQ")
            stated = original.get(name, shape)
            shapes[name] = stated if math.prod(stated) == math.prod(shape) else shape
        return shapes

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise ValueError("it ends early")
        return self.file.read(count)

    def unpack(self, form: str) -> tuple[int, ...]:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def text(self) -> str:
        return self.take(self.unpack("Q")[0]).decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> object:
        """Return an array of whole numbers; other values are passed over."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind]) if kind in _SCALARS else self._unknown(kind)
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
