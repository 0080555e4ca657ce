"""A cache of latents and text embeddings: encoded once, tensors on disk, shared between runs, safe to interrupt.

    <cache>/<version>/<two digits>/<name>.safetensors     name = SHA-256 of the key
    metadata of a file     "key": a checksum of key and tensors in 8 digits, and the key: JSON of all that affects them

A file is written under a temporary name and renamed, so a file that exists is complete. A file that cannot be read, has
another checksum or another key is encoded again, and `new_notes` says so. The most recently used tensors stay in
memory, up to a limit; the rest is read again, which the operating system's cache makes cheap. Without a folder
everything stays in memory. Part of every key is a digest of the encoders, so that a cache never mixes models.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize

from inweave.errors import FormatError, amount
from inweave.files.paths import exists, is_folder, occupied, printable_path
from inweave.files.reading import ensure_regular
from inweave.files.writing import make_folder, write_atomic
from inweave.models.families.base import Tensors

VERSION = 2  # incremented when the same facts lead to other tensors; 1: files without their key, in `<cache>` itself
MEMORY = 2 << 30  # bytes held in memory, if they are in a folder too


class TensorCache:
    """Tensors by facts; ``misses`` and ``hits`` count calls of `get`."""

    def __init__(self, folder: Path | None, memory: int = MEMORY) -> None:
        self._folder = folder
        self._limit = memory
        self._memory: dict[str, Tensors] = {}  # most recently used last
        self._bytes = 0
        self._rejected: dict[str, list[Path]] = {}  # files that were encoded again, by the reason
        self._outdated = folder is not None and _is_outdated(folder)
        self.misses = 0
        self.hits = 0

    def get(self, facts: object, make: Callable[[], Tensors]) -> Tensors:
        """Return the tensors for these facts; ``make`` computes them if they are not cached."""
        key = cache_key(facts)
        name = hashlib.sha256(key.encode()).hexdigest()
        tensors = self._memory.get(name)
        if tensors is None:
            tensors = self._read(name, key)
        if tensors is None:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in make().items()}
            self.misses += 1
            self._write(name, key, tensors)
        else:
            self.hits += 1
        self._remember(name, tensors)
        return tensors

    def new_notes(self) -> list[str]:
        """Return a line for each kind of files that were encoded again since the last call."""
        notes = [
            f"cache: {amount(len(files), 'file')} {reason}, encoded again; the first is {printable_path(files[0])}"
            for reason, files in self._rejected.items()
        ]
        if self._outdated and self.misses:
            self._outdated = False
            notes.append(
                f"cache: files in {printable_path(self._folder or Path())} are of an earlier version, without keys: "
                f"everything is encoded again, into its folder {VERSION}, and its other folders can be deleted"
            )
        self._rejected = {}
        return notes

    def _remember(self, name: str, tensors: Tensors) -> None:
        if name in self._memory:
            self._bytes -= _size(self._memory.pop(name))
        self._memory[name] = tensors
        self._bytes += _size(tensors)
        while self._folder is not None and self._bytes > self._limit and len(self._memory) > 1:
            self._bytes -= _size(self._memory.pop(next(iter(self._memory))))

    def _place(self, name: str) -> Path | None:
        return None if self._folder is None else self._folder / str(VERSION) / name[:2] / f"{name}.safetensors"

    def _read(self, name: str, key: str) -> Tensors | None:
        place = self._place(name)
        if place is None or not occupied(place):
            return None
        try:
            ensure_regular(place)
            with safe_open(place, "pt") as file:
                label = (file.metadata() or {}).get("key")
                tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118
            if label == _label(key, tensors):
                return tensors
        except (OSError, SafetensorError, FormatError, ValueError, TypeError, KeyError, RuntimeError):
            label = f"{'':8} {key}"  # truncated by a crash, or a type that torch lacks
        others = "damaged" if label and label[9:] == key else "with the key of other contents"
        self._rejected.setdefault(others if label else "without a key", []).append(place)
        return None

    def _write(self, name: str, key: str, tensors: Tensors) -> None:
        place = self._place(name)
        if place is None:
            return
        try:
            make_folder(place.parent)
            raw = serialize(tensors, {"key": _label(key, tensors)})  # one entry: they are written in any order
            write_atomic(place, [raw], durable=False)  # other processes may be writing the same file
        except FormatError as error:
            raise FormatError(f"{error}; it is a cache file: set cache_dir to another folder") from None


def _is_outdated(folder: Path) -> bool:
    """Return whether a cache was written by version 1 alone: its files are in folders of two digits."""
    return is_folder(folder) and not exists(folder / str(VERSION)) and any(folder.glob("[0-9a-f][0-9a-f]"))


def cache_key(facts: object) -> str:
    """Return these facts as text; tuples count as lists, paths as text."""
    return json.dumps(facts, sort_keys=True, default=str)


def _label(key: str, tensors: Tensors) -> str:
    return f"{zlib.crc32(key.encode(), tensor_checksum(tensors)):08x} {key}"


def tensor_checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """Compute a checksum that changes with any bit of any tensor; not cryptographic."""
    total = 0
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, total)
    return total


def _size(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
