"""Where weights come from. A network is built *from* a source; it never learns what the source does.

names()                      what there is
spec(name)                   shape and dtype, no data read
get(name, dtype, device)     the tensor

DictSource     tensors in memory
FileSource     a safetensors file or shards, mapped: on the CPU nothing is copied
Renamed        another source under other names: single-file checkpoints seen as diffusers, and back
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from weft.adapter import Tensor
from weft.errors import FormatError, TargetError
from weft.formats.files import open_container
from weft.ops.decode import TORCH, decode
from weft.targets.index import Component
from weft.weights.transfer import ring_for

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(Protocol):
    def names(self) -> Collection[str]: ...

    def spec(self, name: str) -> TensorSpec: ...

    def get(
        self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> torch.Tensor: ...


class DictSource:
    """Tensors that are in memory already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def spec(self, name: str) -> TensorSpec:
        tensor = _known(self._tensors, name)
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def get(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        return _known(self._tensors, name).to(device=device, dtype=dtype)


class FileSource:
    """A safetensors file, an index of shards or a folder of them. Data stays mapped until it is asked for."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        container = open_container(path)
        self.path = Path(path)
        self.files = container.files
        self._tensors: Mapping[str, Tensor] = container.tensors
        self._identity = [_identity(file) for file in self.files]

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def spec(self, name: str) -> TensorSpec:
        tensor = _known(self._tensors, name)
        return TensorSpec(tensor.shape, TORCH[tensor.dtype])

    def get(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        tensor = _known(self._tensors, name)
        stored = TORCH[tensor.dtype]
        if torch.device(device).type == "cuda":
            return ring_for(_numbered(device)).send(decode(tensor, dtype=stored)).to(dtype or stored)
        return decode(tensor, dtype=dtype or stored, device=device)

    def check_unchanged(self) -> None:
        """Raise if a file was replaced, cut or written to since it was opened.

        A mapped file that shrank would end the process on the next read, so this comes first.
        """
        for file, then in zip(self.files, self._identity, strict=True):
            try:
                now = _identity(file)
            except OSError as error:
                raise FormatError(f"{file}: gone since the model was built from it ({error.strerror})") from None
            if now != then:
                raise FormatError(f"{file}: changed on disk since the model was built from it; build the model again")


def _numbered(device: torch.device | str) -> torch.device:
    """`cuda` means the current device; naming it keeps one ring a device."""
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def _identity(file: Path) -> tuple[int, int, int, int]:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Renamed:
    """A source under the other naming of the same network.

    ``component`` indexes the files at hand. Seen as "diffusers", each part is cut out of its home; seen as
    "original", parts are stacked again.
    """

    def __init__(self, source: WeightSource, component: Component) -> None:
        self._source = source
        self._component = component

    def names(self) -> Collection[str]:
        return self._component.homes.keys()

    def spec(self, name: str) -> TensorSpec:
        home = _known(self._component.homes, name)
        return TensorSpec(self._component.parts[name], self._source.spec(home.tensor).dtype)

    def get(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        home = _known(self._component.homes, name)
        tensor = self._source.get(home.tensor, dtype=dtype, device=device)
        if home.length is not None:
            tensor = tensor[home.start : home.start + home.length]
        if home.transpose:
            tensor = tensor.T
        if home.swap:
            tensor = torch.cat(tensor.chunk(2)[::-1])
        return tensor.reshape(self._component.parts[name]) if tensor.shape != self._component.parts[name] else tensor


class Stacked:
    """The reverse: a source in diffusers names seen as the original, fused tensors."""

    def __init__(self, source: WeightSource, component: Component) -> None:
        self._source = source
        self._tiles = component.tiles

    def names(self) -> Collection[str]:
        return self._tiles.keys()

    def spec(self, name: str) -> TensorSpec:
        tiles = _known(self._tiles, name)
        first = tiles[0]
        dtype = self._source.spec(first.part).dtype
        if first.length is None:
            return TensorSpec(first.shape[::-1] if first.transpose else first.shape, dtype)
        return TensorSpec((sum(link.rows for link in tiles), *first.shape[1:]), dtype)

    def get(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        tiles = _known(self._tiles, name)
        parts = []
        for link in tiles:
            part = self._source.get(link.part, dtype=dtype, device=device)
            part = torch.cat(part.chunk(2)[::-1]) if link.swap else part
            parts.append(part.T if link.transpose else part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _known(tensors: Mapping[str, T], name: str) -> T:
    found = tensors.get(name)
    if found is None:
        raise TargetError(f"the source has no tensor {name!r} ({len(tensors):,} others)")
    return found
