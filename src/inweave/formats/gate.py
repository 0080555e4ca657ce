"""The header gate: checks that a safetensors header must pass before anything else reads it.

    file   = length (8 bytes, little-endian) + header (JSON, `length` bytes) + data
    header = {"__metadata__": {str: str}?, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}

Limits: header 16 MiB, 100,000 tensors, 10,000 metadata entries, 8 dimensions, unique names of 1 to 512 printable
characters without `__x__` segments; offsets ascend from 0 to the end of the file without gaps or overlaps, and each
span is exactly as long as its dtype and shape require. A violation raises a `FormatError` that names the rule; no
data is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from inweave.adapter.tensor import BITS
from inweave.errors import FormatError

MAX_HEADER = 16 * 1024 * 1024
MAX_TENSORS = 100_000
MAX_METADATA = 10_000
MAX_DIMS = 8
MAX_NAME = 512
MAX_SIZE = 1 << 62


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """The position of one tensor, relative to the start of the file's data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    spans: Mapping[str, TensorSpan]
    metadata: Mapping[str, str]
    data_start: int


def header_length(prefix: bytes, file_size: int) -> int:
    """Return the header's length from the first 8 bytes, checked against the file size and the limit."""
    if len(prefix) < 8:
        raise FormatError(f"the file has {file_size} bytes; a safetensors file starts with an 8-byte length")
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER:
        raise FormatError(
            f"not a safetensors file: the header claims {length:,} bytes; at most {MAX_HEADER:,} are accepted"
        )
    if length < 2 or 8 + length > file_size:
        raise FormatError(
            f"the header claims {length:,} bytes but the file has {max(file_size - 8, 0):,} after the length: "
            "it is cut short or not a safetensors file"
        )
    return length


def parse_header(raw: bytes, file_size: int) -> Header:
    """Check a header's bytes (without the length) and return the position of each tensor."""
    _check_amount(raw)
    document = _document(raw)
    metadata = _metadata(document.pop("__metadata__", None))
    if len(document) > MAX_TENSORS:
        raise FormatError(f"the header lists {len(document):,} tensors; at most {MAX_TENSORS:,} are accepted")
    data_start = 8 + len(raw)
    spans = {
        name: entry if type(entry) is TensorSpan and _plain_name(name) else _checked_span(name, entry)
        for name, entry in document.items()
    }
    _check_tiling(spans, file_size - data_start)
    return Header(spans, metadata, data_start)


#: tensors without numbers in ComfyUI's files of models, which say how the model is called
_MARKS = frozenset({"__index_timestep_zero__", "__x0__", "__32x32__"})
_METADATA_FIRST = re.compile(r'\s*\{\s*"__metadata__"\s*:\s*')


def split_header(raw: bytes) -> tuple[dict[str, str], bytes] | None:
    """Return (the metadata at the start of a header, a digest of the rest), or None for a malformed header.

    Two headers with the same digest have the same tensors at the same offsets, so if `parse_header` accepted one, it
    accepts the other for data of the same length. The tensors themselves are not read.
    """
    try:
        _check_amount(raw)
        text = raw.decode("utf-8")
        if (match := _METADATA_FIRST.match(text)) is None:
            return {}, hashlib.sha256(raw).digest()
        decoder = json.JSONDecoder(object_pairs_hook=_no_repeats, parse_constant=_no_constant)
        metadata, end = decoder.raw_decode(text, match.end())
        return _metadata(metadata), hashlib.sha256(text[end:].encode("utf-8")).digest()
    except (FormatError, ValueError, RecursionError, MemoryError):
        return None  # parse_header reports the problem


_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


def _check_amount(raw: bytes) -> None:
    """Raise FormatError for more objects and lists than the limits allow, before parsing allocates memory for them."""
    if (
        raw.count(b"[") <= 2 * MAX_TENSORS
        and raw.count(b"{") <= MAX_TENSORS + 2
        and raw.count(b",") <= 12 * MAX_TENSORS
    ):
        return
    structure = _TEXT.sub(b"", raw)  # metadata may hold JSON as text
    lists, objects, commas = structure.count(b"["), structure.count(b"{"), structure.count(b",")
    if lists > 2 * MAX_TENSORS or objects > MAX_TENSORS + 2 or commas > 12 * MAX_TENSORS:
        raise FormatError(
            f"the header holds more objects than {MAX_TENSORS:,} tensors need; at most {MAX_TENSORS:,} are accepted"
        )


def _document(raw: bytes) -> dict[str, object]:
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_compact, parse_constant=_no_constant)
    except FormatError:
        raise
    except RecursionError:
        raise FormatError("the header is nested too deeply to be a safetensors header") from None
    except (ValueError, MemoryError) as error:
        raise FormatError(f"the header is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        kind = "tensor without a name" if isinstance(document, TensorSpan) else f"JSON {type(document).__name__}"
        raise FormatError(f"the header is a {kind}; an object was expected")
    return document


def _compact(pairs: list[tuple[str, object]]) -> object:
    """Convert an object of the header: a well-formed tensor to its span, anything else to a dictionary."""
    if len(pairs) == 3:
        (_, dtype), (_, shape), (_, offsets) = pairs
        keys = (pairs[0][0], pairs[1][0], pairs[2][0])
        if keys == _USUAL_KEYS and type(shape) is list and type(offsets) is list and len(offsets) == 2:
            begin, end = offsets
            if type(dtype) is str and type(begin) is type(end) is int and begin >= 0 and len(shape) <= 4:
                size = BITS.get(dtype, 0)
                for each in shape:
                    if type(each) is not int or not 0 < each < _SMALL:
                        size = 0
                        break
                    size *= each
                if size and size == 8 * (end - begin):
                    return TensorSpan(dtype, tuple(shape), begin, end)
    return _no_repeats(pairs)


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FormatError(f"the header names {_quoted(name)} twice")
    return document


def _no_constant(name: str) -> object:
    raise FormatError(f"the header holds {name}, which is not JSON")


def _metadata(metadata: object) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise FormatError("__metadata__ is not an object of strings")
    if len(metadata) > MAX_METADATA:
        raise FormatError(f"__metadata__ has {len(metadata):,} entries; at most {MAX_METADATA:,} are accepted")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise FormatError(f"metadata {_quoted(key)} is a {type(value).__name__}; only strings are allowed")
        if not (_is_text(key) and _is_text(value)):
            raise FormatError(f"metadata {_quoted(key)} holds half a surrogate pair, which is not valid text")
    return metadata


def _is_text(value: str) -> bool:
    """Return whether a string has no lone surrogates, which JSON can express but nothing can print or write."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


_USUAL_KEYS = ("dtype", "shape", "data_offsets")
_SMALL = 1 << 24
_PLAIN = re.compile(r"[a-zA-Z0-9]+(?:[._][a-zA-Z0-9]+)*")


def _plain_name(name: str) -> bool:
    """Return whether a name consists of ASCII words joined by single dots and underscores, so needs no more checks."""
    return len(name) <= MAX_NAME and _PLAIN.fullmatch(name) is not None


def _checked_span(name: str, entry: object) -> TensorSpan:
    """Return a tensor's position, checked field by field to report the exact problem."""
    _check_name(name)
    if type(entry) is TensorSpan:
        return entry
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"tensor {_quoted(name)} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise FormatError(f"tensor {_quoted(name)} has dtype {_quoted(dtype)}; known are {', '.join(BITS)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_size(size) for size in shape):
        raise FormatError(
            f"tensor {_quoted(name)} has shape {_quoted(shape)}; at most {MAX_DIMS} sizes >= 0 are accepted"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(at) for at in offsets):
        raise FormatError(f"tensor {_quoted(name)} has data_offsets {_quoted(offsets)}; two positions were expected")
    begin, end = offsets
    count = math.prod(shape)
    if (count or math.prod(filter(None, shape))) >= MAX_SIZE:  # even with a 0: no array library accepts the shape
        raise FormatError(f"tensor {_quoted(name)} has shape {shape}: more numbers than can be counted")
    size = count * BITS[dtype] // 8
    if size != end - begin:
        raise FormatError(
            f"tensor {_quoted(name)}: {dtype} {shape} takes {size:,} bytes, data_offsets give {end - begin:,}"
        )
    return TensorSpan(dtype, tuple(shape), begin, end)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_SIZE


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME:
        raise FormatError(f"a tensor name has {len(name)} characters; 1 to {MAX_NAME} are accepted: {_quoted(name)}")
    if not name.isprintable():
        raise FormatError(f"tensor name {_quoted(name)} holds control or unprintable characters")
    if "__" in name and any(_is_dunder(part) for part in name.split(".")):
        raise FormatError(f"tensor name {_quoted(name)} has a segment that starts with two underscores")


def _is_dunder(segment: str) -> bool:
    return segment not in _MARKS and segment.startswith("__") and segment.strip("_") != ""


def _check_tiling(spans: Mapping[str, TensorSpan], available: int) -> None:
    position = 0
    for name, span in sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)):
        if span.begin != position:
            what = "overlaps the previous one" if span.begin < position else "leaves a gap before it"
            raise FormatError(f"tensor {_quoted(name)} starts at byte {span.begin:,}, not {position:,}: it {what}")
        position = span.end
    if position > available:
        raise FormatError(
            f"the tensors need {position:,} bytes but the file holds {available:,}: it is cut short; "
            "download or copy it again"
        )
    if position < available:
        raise FormatError(f"{available - position:,} bytes follow the last tensor; nothing describes them")


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
