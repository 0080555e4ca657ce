"""Layouts: the names, dtypes and shapes of a file's tensors, with the metadata that decides how they are read.

    layout -> base, algorithms, ranks, dialects, problems

Thousands of files share a layout, so each one is parsed once, and later recognized by a digest of its header. Only the
metadata is read from every file: it may name the base if several fit.

A scan reads nothing but headers. If reading a layout depends on numbers (a scale, the rows of a widened base), they are
part of the cache key. The alphas of LoRA and LoHa, a thousand of them scattered over a file, are assumed to be ordinary
numbers until the whole file is read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from inweave.adapter import Adapter, Tensor
from inweave.adapter.tensor import scalar
from inweave.errors import FormatError
from inweave.exchange.load import load
from inweave.files.reading import open_regular
from inweave.formats.files import ADAPTER_FILES, header_bytes
from inweave.formats.gate import Header, TensorSpan, parse_header, split_header
from inweave.formats.read import deciding_metadata, read
from inweave.library.entry import MAX_PROBLEMS
from inweave.targets.declared import declarations
from inweave.targets.detect import Fit, fit

MAX_LAYOUTS = 2000
_MAX_VALUES = 8  # tensors with more numbers than this never decide how others are read


@dataclass(frozen=True, slots=True)
class Layout:
    """The part of `LibraryFacts` that follows from the tensors."""

    tensors: int
    algorithms: tuple[str, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[str, ...]
    dialects: tuple[str, ...]
    modules: int
    base: str | None
    confidence: float
    evidence: tuple[str, ...]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class _Known:
    """A cached layout, without its base, which also depends on the metadata of each file."""

    contents: Layout
    fit: Fit

    def layout(self, metadata: Mapping[str, str], config: Mapping[str, object] | None = None) -> Layout:
        detection = self.fit.decide(tuple(declarations(metadata, config)))
        evidence = tuple(detection.evidence)
        return replace(self.contents, base=detection.base, confidence=detection.confidence, evidence=evidence)


@dataclass(frozen=True, slots=True)
class _Header:
    """A cached header: the length of its data, and the numbers that decide how it is read."""

    data_bytes: int
    values: tuple[TensorSpan, ...]


class LayoutReader:
    """Reads headers, and caches their layouts."""

    def __init__(self) -> None:
        self._headers: dict[bytes, _Header] = {}
        self._layouts: dict[tuple[object, ...], _Known] = {}

    def read(self, path: Path) -> tuple[Layout, Mapping[str, str]]:
        """Return (the layout, the metadata) of a file or a PEFT folder; raise FormatError if it is not an adapter."""
        may_have_config = path.name in ADAPTER_FILES[:2]
        if path.suffix == ".safetensors" and not may_have_config:
            with open_regular(path, buffering=0) as file:
                if (known := self._read_header(path, file)) is not None:
                    return known
        adapter = load(path)
        return exact_layout(adapter), adapter.metadata

    def _read_header(self, path: Path, file: BinaryIO) -> tuple[Layout, Mapping[str, str]] | None:
        """Return the layout from the header alone; None if the file has to be read by `load`."""
        raw, size = header_bytes(path, file)
        if (parts := split_header(raw)) is None:
            return None
        metadata, digest = parts
        data_start = 8 + len(raw)
        header = None
        if digest not in self._headers:
            header = _parsed(raw, size, metadata)
            if header is None:
                return None
            self._remember(digest, header, size - data_start)
        known_header = self._headers[digest]
        if known_header.data_bytes != size - data_start:
            return None
        deciding = deciding_metadata(metadata)
        numbers = tuple(
            os.pread(file.fileno(), span.end - span.begin, data_start + span.begin) for span in known_header.values
        )
        key = (digest, tuple(sorted(deciding.items())), numbers)
        if key not in self._layouts:
            header = header or _parsed(raw, size, metadata)
            known = (
                None
                if header is None
                else _known_of(header, deciding, dict(zip(known_header.values, numbers, strict=True)))
            )
            if known is None:
                return None
            self._layouts[key] = known
        return self._layouts[key].layout(metadata), metadata

    def _remember(self, digest: bytes, header: Header, data_bytes: int) -> None:
        if len(self._headers) >= MAX_LAYOUTS:
            self._headers.clear()
            self._layouts.clear()
        self._headers[digest] = _Header(data_bytes, tuple(_values(header).values()))


def exact_layout(adapter: Adapter) -> Layout:
    """Return the layout of an adapter with all its numbers."""
    return _summary(adapter).layout(adapter.metadata, adapter.config)


def _summary(adapter: Adapter) -> _Known:
    contents = Layout(
        tensors=len(adapter.tensors),
        algorithms=tuple(adapter.algorithms),
        ranks=tuple(sorted({e.factors.rank for e in adapter if e.factors.rank is not None})),
        dtypes=tuple(sorted({tensor.dtype for tensor in adapter.tensors.values()})),
        dialects=tuple(adapter.dialects),
        modules=len({e.ref for e in adapter}),
        base=None,
        confidence=0.0,
        evidence=(),
        warnings=adapter.warnings[:MAX_PROBLEMS],
        problems=tuple(f"{', '.join(p.keys[:2])}: {p.reason}" for p in adapter.problems)[:MAX_PROBLEMS],
    )
    return _Known(contents, fit(adapter))


def _parsed(raw: bytes, size: int, metadata: Mapping[str, str]) -> Header | None:
    """Return the header; None if it is malformed, or if its metadata does not come first."""
    try:
        header = parse_header(raw, size)
    except FormatError:
        return None
    return header if header.metadata == metadata else None


def _known_of(header: Header, deciding: Mapping[str, str], numbers: Mapping[TensorSpan, bytes]) -> _Known | None:
    """Return the cache entry of a layout; None if reading fails, or if its base depends on more than the layout."""
    tensors = {name: _tensor(name, span, numbers.get(span)) for name, span in header.spans.items()}
    try:
        known = _summary(read(tensors, deciding))
    except FormatError:
        return None
    return None if known.fit.fixed is not None and known.contents.modules else known


def _values(header: Header) -> dict[str, TensorSpan]:
    """Return the tensors that may decide how others are read: all short ones but the alphas of LoRA and LoHa."""
    kronecker = any("lokr" in name for name in header.spans)  # their alpha can reveal the intended rank
    return {
        name: span
        for name, span in header.spans.items()
        if 0 < math.prod(span.shape) <= _MAX_VALUES and (kronecker or not _is_alpha(name, span))
    }


def _is_alpha(name: str, span: TensorSpan) -> bool:
    return name.endswith(".alpha") and math.prod(span.shape) == 1


def _tensor(name: str, span: TensorSpan, numbers: bytes | None) -> Tensor:
    """Return a tensor without its numbers, unless they decide something; an alpha is 1."""
    if numbers is None and _is_alpha(name, span):
        try:
            return scalar(1.0, span.dtype, span.shape)
        except (KeyError, ValueError):  # not a dtype for a number: `read` reports it
            numbers = bytes(span.end - span.begin)
    return Tensor(span.dtype, span.shape, numbers or b"")
