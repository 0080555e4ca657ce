"""Encoded once, kept on disk: latents and text, shared between runs, safe to interrupt.

    <cache>/<two digits>/<key>.safetensors      key = SHA-256 of everything that decides the numbers

A file is written beside its place and renamed, so what is there is whole, and holds a sum of its tensors. One that cannot
be read, or has another sum, is made again. What was
used last stays in memory, up to a limit; the rest is read again, which the system's own cache makes cheap. Without a
folder everything stays in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from inweave.errors import FormatError

VERSION = 1  # of what is stored under a key: raised when the same facts give other tensors
MEMORY = 2 << 30  # bytes kept, where a folder has them too

Tensors = dict[str, torch.Tensor]


class TensorCache:
    """Tensors by key; ``made`` and ``found`` count what `get` did."""

    def __init__(self, folder: Path | None, memory: int = MEMORY) -> None:
        self._folder = folder
        self._limit = memory
        self._memory: dict[str, Tensors] = {}  # the last used last
        self._bytes = 0
        self.made = 0
        self.found = 0

    def get(self, facts: object, make: Callable[[], Tensors]) -> Tensors:
        """What ``make`` gives for these facts; made only if it is not there yet."""
        key = key_of(facts)
        kept = self._memory.get(key)
        if kept is None:
            kept = self._read(key)
        if kept is None:
            kept = {name: tensor.detach().cpu().contiguous() for name, tensor in make().items()}
            self.made += 1
            self._write(key, kept)
        else:
            self.found += 1
        self._remember(key, kept)
        return kept

    def _remember(self, key: str, tensors: Tensors) -> None:
        if key in self._memory:
            self._bytes -= _size(self._memory.pop(key))
        self._memory[key] = tensors
        self._bytes += _size(tensors)
        while self._folder is not None and self._bytes > self._limit and len(self._memory) > 1:
            self._bytes -= _size(self._memory.pop(next(iter(self._memory))))

    def _place(self, key: str) -> Path | None:
        return None if self._folder is None else self._folder / key[:2] / f"{key}.safetensors"

    def _read(self, key: str) -> Tensors | None:
        place = self._place(key)
        if place is None or not place.is_file():
            return None
        try:
            tensors = load_file(place)
            with safe_open(place, "pt") as file:
                known = (file.metadata() or {}).get("sum")
        except (OSError, SafetensorError, ValueError):
            return None  # cut by a crash of the disk: made again, and replaced
        return tensors if known == str(sum_of(tensors)) else None  # so is what is whole, and not what was written

    def _write(self, key: str, tensors: Tensors) -> None:
        place = self._place(key)
        if place is None:
            return
        beside = place.with_name(f".{key}.{secrets.token_hex(4)}")  # other processes may be making the same
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, beside, {"sum": str(sum_of(tensors))})
            beside.replace(place)
        except (OSError, SafetensorError) as error:
            raise FormatError(f"{place}: the cache cannot be written: {error}; set cache_dir elsewhere") from None
        finally:
            with contextlib.suppress(OSError):  # whatever stopped it, nothing half is left behind
                beside.unlink(missing_ok=True)


def key_of(facts: object) -> str:
    """The name of what these facts decide; every tuple is a list, every path text."""
    text = json.dumps([VERSION, facts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sum_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Changes with any bit of any tensor; not for those who mean harm."""
    total = 0
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, total)
    return total


def _size(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
