"""Sources of weights: a network is built from a source and does not depend on where its tensors come from.

names()        the names of all tensors
spec(name)     shape and dtype, no data read
get(name)      the tensor, in a dtype, on a device; ``rows`` (start, length) cuts it along its first axis.
               It may be a view of the source's memory. ``owned``: the caller owns the memory and may write to it, and
               no page of a file stays mapped for it.

DictSource     tensors in memory
FileSource     a safetensors file or shards, mapped: on the CPU nothing is copied
Renamed        another source under other names: single-file checkpoints seen as diffusers
Stacked        and back
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import torch

from inweave.adapter import Tensor
from inweave.errors import FormatError, TargetError
from inweave.files.paths import as_path
from inweave.files.reading import open_regular
from inweave.files.stamps import Stamp, stamp_of
from inweave.formats.files import open_container
from inweave.ops.quantized import QuantizedWeight
from inweave.ops.tensors.decode import TORCH, decode
from inweave.ops.tensors.subclasses import class_of, holds_others, is_sharded, whole
from inweave.targets.index import Component
from inweave.targets.links import Link
from inweave.targets.plan import Rows
from inweave.weights.held import quantized_weight, unscaled, with_halves_swapped
from inweave.weights.transfer import FileSpan, read_bytes, ring_for, stream

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor, known without reading its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@runtime_checkable
class WeightSource(Protocol):
    """The protocol of a source of weights; anything with these three methods qualifies."""

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        ...

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of one tensor, without reading its data.

        Raises:
            TargetError: There is no tensor of this name.
        """
        ...

    def get(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: Rows | None = None,
        owned: bool = False,
    ) -> torch.Tensor:
        """Return one tensor.

        Args:
            name: One of `names`.
            dtype: To convert to; None: its own.
            device: Where the result is stored.
            rows: (start, length) along the first axis; None: all of them.
            owned: The caller may write to the result, so its memory is not shared.

        Raises:
            TargetError: There is no tensor of this name.
        """
        ...


class DictSource:
    """Tensors that are already in memory.

    Args:
        tensors: The tensors by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._tensors.keys()

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of one tensor, without reading its data."""
        tensor = _known(self._tensors, name)
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def get(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: Rows | None = None,
        owned: bool = False,
    ) -> torch.Tensor:
        """Return one tensor; see `WeightSource.get`."""
        tensor = _known(self._tensors, name)
        if holds_others(tensor) and not is_sharded(tensor):
            raise TargetError(f"{name}: stored as {class_of(tensor)}; give the source plain floating-point tensors")
        return _cut(whole(tensor), rows).to(device=device, dtype=dtype, copy=owned)


class FileSource:
    """A safetensors file, an index of shards or a folder of them. Data is mapped and read on demand.

    Args:
        path: The file, index or folder.

    Raises:
        FormatError: A file cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        container = open_container(as_path(path).absolute())  # it is read again later, from any working directory
        self.path = Path(path)
        self.files = container.files
        self._tensors: Mapping[str, Tensor] = container.tensors
        self._places = container.places
        self.metadata = container.metadata
        self.stamps = {file: stamp_of(file.stat()) for file in self.files}
        self.viewed: set[Path] = set()  # of which tensors are views

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._tensors.keys()

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of one tensor, without reading its data."""
        tensor = _known(self._tensors, name)
        return TensorSpec(tensor.shape, TORCH[tensor.dtype])

    def get(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: Rows | None = None,
        owned: bool = False,
    ) -> torch.Tensor:
        """Return one tensor; see `WeightSource.get`."""
        tensor = _known(self._tensors, name)
        start, length = 0, len(tensor.data)
        if rows is not None:
            stride = len(tensor.data) // tensor.shape[0]
            start, length = rows[0] * stride, rows[1] * stride
            tensor = Tensor(tensor.dtype, (rows[1], *tensor.shape[1:]), tensor.data[start : start + length])
        stored = TORCH[tensor.dtype]
        if torch.device(device).type == "cuda" and length:
            raw = self._send(name, start, length, _with_index(device))
            return raw.view(stored).view(tensor.shape).to(dtype or stored)
        if owned or dtype not in (None, stored):  # the result is a copy, so the map is not touched
            tensor = Tensor(tensor.dtype, tensor.shape, self._read(name, start, length))
        else:
            self.viewed.add(self._places[name][0])
        return decode(tensor, dtype=dtype or stored, device=device)

    def quantized(self, name: str, device: torch.device | str, rows: Rows | None = None) -> QuantizedWeight | None:
        """Return a plain fp8 weight with scales of 1; see `quantized_weight`."""
        shape, dtype = (spec := self.spec(name)).shape, spec.dtype
        if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) or len(shape) < 2:
            return None
        if torch.device(device).type == "meta":
            numbers = torch.empty(shape, dtype=dtype, device=device)[: None if rows is None else rows[1]]
        else:
            numbers = self.get(name, device=device, rows=rows, owned=True)
        return unscaled(numbers)

    def stream(self, names: Collection[str], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors as stored, on a device, in memory of their own; the files are read in their order, ahead."""
        places = {name: self._places[name] for name in names if _known(self._tensors, name) is not None}
        ordered = sorted(places, key=lambda name: (str(places[name][0]), places[name][1]))
        with ExitStack() as opened:
            files = {}
            for path in dict.fromkeys(path for path, _ in places.values()):
                files[path] = opened.enter_context(open_regular(path, buffering=0, error=_unreadable))
                self._check_same(path, os.fstat(files[path].fileno()))
            spans = [FileSpan(files[places[n][0]], places[n][1], len(self._tensors[n].data)) for n in ordered]
            for name, raw in zip(ordered, stream(spans, _with_index(device)), strict=True):
                tensor = self._tensors[name]
                yield name, raw.view(TORCH[tensor.dtype]).view(tensor.shape)
            for path, file in files.items():
                self._check_same(path, os.fstat(file.fileno()))

    def _send(self, name: str, start: int, length: int, device: torch.device) -> torch.Tensor:
        """Return the bytes of a tensor on a GPU, by plain reads into pinned memory."""
        path, offset = self._places[name]
        try:
            with path.open("rb", buffering=0) as file:
                self._check_same(path, os.fstat(file.fileno()))
                return ring_for(device).send_file(file, offset + start, length)
        except OSError as error:
            raise FormatError(f"{path}: cannot be read again: {error.strerror}") from None

    def _read(self, name: str, start: int, length: int) -> memoryview:
        """Return the bytes of a tensor, by a plain read."""
        path, offset = self._places[name]
        with open_regular(path, buffering=0, error=_unreadable) as file:
            self._check_same(path, os.fstat(file.fileno()))
            return read_bytes(file, offset + start, length)

    def check_unchanged(self) -> None:
        """Raise if a file was replaced, cut or written to since it was opened.

        A mapped file that shrank would end the process on the next read, so this comes first.
        """
        for file in self.files:
            try:
                now = file.stat()
            except OSError as error:
                raise FormatError(f"{file}: disappeared since it was opened ({error.strerror})") from None
            self._check_same(file, now)

    def _check_same(self, file: Path, now: os.stat_result) -> None:
        if stamp_of(now) != self.stamps[file]:
            raise FormatError(f"{file}: changed on disk since it was opened; build the model again")


def _unreadable(text: str) -> FormatError:
    return FormatError(f"{text}; it cannot be read again")


def _with_index(device: torch.device | str) -> torch.device:
    """Return the device with its index (`cuda` is the current one), so that there is one ring per device."""
    chosen = torch.device(device)
    if chosen.type != "cuda" or chosen.index is not None:
        return chosen
    return torch.device("cuda", torch.cuda.current_device())


class Renamed:
    """A source under the other naming of the same network.

    ``component`` indexes the source's files. Each part in diffusers names is cut out of the tensor that holds it;
    `Stacked` is the reverse.
    """

    def __init__(self, source: WeightSource, component: Component) -> None:
        self._source = source
        self._component = component
        self.stamps, self.viewed = stamps_of(source), getattr(source, "viewed", ())

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._component.homes.keys()

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of one tensor, without reading its data."""
        home = _known(self._component.homes, name)
        return TensorSpec(self._component.parts[name], self._source.spec(home.tensor).dtype)

    def get(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: Rows | None = None,
        owned: bool = False,
    ) -> torch.Tensor:
        """Return one tensor; see `WeightSource.get`."""
        home = _known(self._component.homes, name)
        span = None if home.length is None else (home.start, home.length)
        copied = owned or home.swap
        tensor = self._source.get(home.tensor, dtype=dtype, device=device, rows=span, owned=copied)
        return _cut(self._part(name, tensor), rows)

    def quantized(self, name: str, device: torch.device | str, rows: Rows | None = None) -> QuantizedWeight | None:
        """Return a part that is some rows of its home; see `quantized_weight`."""
        home, shape = _known(self._component.homes, name), self._component.parts[name]
        start, length = (home.start, home.length) if home.length is not None else (0, shape[0] if shape else 0)
        stored = self._source.spec(home.tensor).shape
        same = len(stored) > 1 < len(shape) and math.prod(stored[1:]) == math.prod(shape[1:]) and length == shape[0]
        if home.transpose or not same:
            return None
        if rows is not None:
            if home.swap:
                return None
            start, length = start + rows[0], rows[1]
        span = None if (start, length) == (0, stored[0]) else (start, length)
        weight = quantized_weight(self._source, home.tensor, device, span)
        return weight if weight is None or not home.swap else with_halves_swapped(weight)

    def stream(self, names: Collection[str], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors as stored, on a device, in memory of their own; see `FileSource.stream`."""
        parts: dict[str, list[str]] = {}
        for name in names:
            parts.setdefault(_known(self._component.homes, name).tensor, []).append(name)
        for stored, tensor in streamed(self._source, parts, device):
            for name in parts[stored]:
                home = self._component.homes[name]
                span = None if home.length is None else (home.start, home.length)
                yield name, self._part(name, tensor if span in (None, (0, len(tensor))) else _cut(tensor, span).clone())

    def _part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a part from the rows of its home."""
        home = self._component.homes[name]
        if home.transpose:
            tensor = tensor.T
        if home.swap:
            tensor = torch.cat(tensor.chunk(2)[::-1])
        return tensor.reshape(self._component.parts[name])


class Stacked:
    """A source in diffusers names, seen as the original, fused tensors: the reverse of `Renamed`."""

    def __init__(self, source: WeightSource, component: Component) -> None:
        self._source = source
        self._tiles = component.tiles

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._tiles.keys()

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of one tensor, without reading its data."""
        tiles = _known(self._tiles, name)
        first = tiles[0]
        dtype = reduce(torch.promote_types, (self._source.spec(link.part).dtype for link in tiles))
        if first.length is None:
            return TensorSpec(first.shape[::-1] if first.transpose else first.shape, dtype)
        return TensorSpec((sum(link.rows for link in tiles), *first.shape[1:]), dtype)

    def get(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: Rows | None = None,
        owned: bool = False,
    ) -> torch.Tensor:
        """Return one tensor; see `WeightSource.get`."""
        tiles = _known(self._tiles, name)
        if len(tiles) == 1:
            return _cut(self._part(tiles[0], dtype, device, owned), rows)
        spec, at = self.spec(name), 0
        whole = torch.empty(spec.shape, dtype=dtype or spec.dtype, device=device)
        for link in tiles:
            part = self._part(link, dtype, device, True)
            whole[at : at + len(part)] = part
            at += len(part)
        return _cut(whole, rows)

    def _part(self, link: Link, dtype: torch.dtype | None, device: torch.device | str, owned: bool) -> torch.Tensor:
        part = self._source.get(link.part, dtype=dtype, device=device, owned=owned or link.swap)
        part = torch.cat(part.chunk(2)[::-1]) if link.swap else part
        return part.T if link.transpose else part


def streamed(source: WeightSource, names: Collection[str], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as stored, on a device, in the order that suits the source."""
    read = getattr(source, "stream", None)
    if read is not None:
        yield from read(names, device)
    else:
        yield from ((name, source.get(name, device=device, owned=True)) for name in names)


def stamps_of(source: WeightSource) -> Mapping[Path, Stamp]:
    """Return the files that a source reads, with their stamps when they were opened; empty if it is not known."""
    return getattr(source, "stamps", {})


def _cut(tensor: torch.Tensor, rows: Rows | None) -> torch.Tensor:
    return tensor if rows is None else tensor[rows[0] : sum(rows)]


def _known(tensors: Mapping[str, T], name: str) -> T:
    value = tensors.get(name)
    if value is None:
        raise TargetError(f"the source has no tensor {name!r} ({len(tensors):,} others)")
    return value
