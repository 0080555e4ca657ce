"""Quantized denoisers on disk, so that a second start reads one file instead of the base, and quantizes nothing.

    <folder>/<name>.safetensors     name = SHA-256 of the key
    key         version, format, dtype, kind of device that quantized, class and configuration of the denoiser, and the
                files of the base with their stamps: a base that was replaced or written to has another key
    tensors     "<layer>:<field>" of every quantized layer; everything else is read from the base
    metadata    key; note; extra: what the writer knows about the base; checksums: CRC-32 of every tensor

A file is flushed to disk and then renamed, so one that exists is whole; its checksums are verified before it is used,
and a file that is damaged is made again. After a file was written, files whose base is gone or has changed are removed,
then those that were used longest ago, until all of them are within the budget..
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inweave.adapter import Tensor
from inweave.errors import FormatError, InweaveError
from inweave.files.paths import printable_path
from inweave.files.stamps import path_stamp
from inweave.files.writing import make_folder
from inweave.formats.files import read_header, write_file
from inweave.models.blueprint import NetworkBlueprint
from inweave.ops.quantized import QuantizedWeight, format_of
from inweave.ops.tensors.decode import DTYPE_NAMES
from inweave.targets.plan import Rows
from inweave.weights.networks import quantized_layers
from inweave.weights.source import FileSource, TensorSpec, WeightSource, stamps_of

VERSION = 1  # incremented when the same weights are quantized to other bits
SMALLEST = 256 << 20  # bytes; smaller denoisers are not cached: quantizing them takes no longer than reading a file
_ABANDONED = 24 * 3600  # seconds after which a temporary file has no writer any more


@dataclass(frozen=True, slots=True)
class CachedBase:
    """A quantized denoiser of the cache: its layers, the note of the quantizer, and what the writer added."""

    file: FileSource
    format: str
    note: str
    extra: Mapping[str, Any]

    def over(self, base: WeightSource) -> WeightSource:
        """Return a source of the base, under the names of the network, that offers these weights as quantized."""
        return _Overlaid(base, self)

    @property
    def layers(self) -> set[str]:
        """The names of the quantized layers."""
        return {name.rpartition(":")[0] for name in self.file.names()}

    def ensure_used(self, network: nn.Module) -> None:
        """Raise if a layer did not take its weight."""
        if missing := self.layers - quantized_layers(network).keys():
            raise InweaveError(f"{self.file.path}: does not fit {min(missing)}; remove this file")


class _Overlaid:
    """The base, with quantized weights."""

    def __init__(self, base: WeightSource, cached: CachedBase) -> None:
        self._base, self._cached, self._layers = base, cached, cached.layers

    def names(self) -> Collection[str]:
        return self._base.names()

    def spec(self, name: str) -> TensorSpec:
        return self._base.spec(name)

    def get(self, name: str, **options: Any) -> torch.Tensor:
        return self._base.get(name, **options)

    def quantized(self, name: str, device: torch.device | str, rows: Rows | None = None) -> QuantizedWeight | None:
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight" or layer not in self._layers or rows is not None:
            return None
        kind = format_of(self._cached.format).weights
        weight: QuantizedWeight = kind(
            *(self._cached.file.get(f"{layer}:{field}", device=device, owned=True) for field in kind._fields)
        )
        return weight


class QuantizedCache:
    """The files in ``folder``, which may take ``gigabytes``. ``problem``: why the last file could not be used."""

    def __init__(self, folder: Path, gigabytes: float) -> None:
        self._folder, self._budget = folder, int(gigabytes * 2**30)
        self.problem = ""

    def key(self, part: NetworkBlueprint, format: str, dtype: torch.dtype, device: torch.device) -> str:
        """Return what decides the bits of a quantized denoiser; "" if it cannot be known without reading them."""
        stamps = stamps_of(part.source)
        if not stamps or not self._budget:
            return ""
        facts = {
            "version": VERSION, "format": format, "dtype": str(dtype), "device": device.type, "class": part.class_name,
            "config": part.config, "base": [[str(file), stamp] for file, stamp in stamps.items()],
        }  # fmt: skip
        return json.dumps(facts, sort_keys=True, default=str)

    def find(self, key: str) -> CachedBase | None:
        """Return the file with this key; None if there is none, or it is damaged (`problem` says so)."""
        self.problem = ""
        place = self._place(key)
        if not key or not place.exists():
            return None
        with suppress(OSError):
            os.utime(place)  # when it was used last
        try:
            file = FileSource(place)
            facts = json.loads(file.metadata["facts"])
            if facts["key"] != key:
                raise FormatError(f"{place}: has another key")
            _verify(file, facts["checksums"])
            cached = CachedBase(file, json.loads(key)["format"], facts["note"], facts["extra"])
        except (FormatError, ValueError, KeyError, TypeError) as error:
            self.problem = f"the quantized base is made again, since its file cannot be used: {error}"
            return None
        return cached

    def store(self, key: str, network: nn.Module, note: str, extra: Mapping[str, Any]) -> str:
        """Write the quantized layers of a network; returns a note for the log, or "" if they are not worth a file."""
        tensors = {
            f"{name}:{field}": tensor.detach()
            for name, layer in quantized_layers(network).items()
            for field, tensor in zip(layer.weights._fields, layer.quantized, strict=True)
        }
        size = sum(tensor.nbytes for tensor in tensors.values())
        if not key or not _unchanged(json.loads(key)) or size < SMALLEST or size > self._budget:
            return ""
        place = self._place(key)
        try:
            make_folder(self._folder)
            if (free := shutil.disk_usage(self._folder).free) < 2 * size:
                return f"the quantized base is not kept: {_gib(free)} are free in {printable_path(self._folder)}"
            stored = {name: _stored(tensor) for name, tensor in tensors.items()}
            sums = {name: zlib.crc32(tensor.data) for name, tensor in stored.items()}
            facts = {"key": key, "note": note, "extra": extra, "checksums": sums}
            write_file(place, stored, {"facts": json.dumps(facts)})
        except (FormatError, OSError) as error:
            return f"the quantized base is not kept: {error}"
        removed = self._clean(place)
        more = f"; {len(removed)} older ones were removed" if removed else ""
        return f"the next start reads the quantized base from {printable_path(place)} ({_gib(size)}){more}"

    def _place(self, key: str) -> Path:
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.safetensors"

    def _clean(self, latest: Path) -> list[Path]:
        """Remove files until the others are within the budget; returns those that were removed."""
        removed: list[Path] = []
        with suppress(OSError):
            for part in self._folder.glob(".*.part"):
                if part.stat().st_mtime < time.time() - _ABANDONED:
                    part.unlink()
            others = [path for path in self._folder.glob("*.safetensors") if path != latest]
            by_use = sorted(others, key=lambda path: (_is_current(path), path.stat().st_mtime))
            total = sum(path.stat().st_size for path in (*others, latest))
            for path in by_use:
                if total <= self._budget and _is_current(path):
                    break
                total -= path.stat().st_size
                path.unlink()
                removed.append(path)
        return removed


def _is_current(path: Path) -> bool:
    """Return whether the base of a file still is what it was made from."""
    try:
        key = json.loads(json.loads(read_header(path).metadata["facts"])["key"])
        return key["version"] == VERSION and _unchanged(key)
    except (FormatError, OSError, ValueError, KeyError, TypeError):
        return False


def _unchanged(key: Mapping[str, Any]) -> bool:
    """Return whether the files of a base are those of a key."""
    return all(list(path_stamp(Path(file))) == stamp for file, stamp in key["base"])


def _verify(file: FileSource, checksums: Mapping[str, int]) -> None:
    """Raise FormatError unless every tensor has its checksum; they are computed in threads."""
    if file.names() != checksums.keys():
        raise FormatError(f"{file.path}: has other tensors than it should")

    def checksum(name: str) -> int:
        return zlib.crc32(file.get(name, owned=True).flatten().view(torch.uint8).numpy().data)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for name, actual in zip(checksums, pool.map(checksum, checksums), strict=True):
            if actual != checksums[name]:
                raise FormatError(f"{file.path}: {name} is damaged")


def _stored(tensor: torch.Tensor) -> Tensor:
    """Return a tensor's bytes, without a copy if they are in host memory."""
    host = tensor.cpu().contiguous()
    return Tensor(DTYPE_NAMES[host.dtype], tuple(host.shape), host.flatten().view(torch.uint8).numpy().data)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
