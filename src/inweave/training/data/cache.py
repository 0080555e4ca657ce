"""A cache of latents and text embeddings: encoded once, tensors on disk, shared between runs, safe to interrupt.

    <cache>/<two digits>/<key>.safetensors      key = SHA-256 of everything that affects the tensors

A file is written under a temporary name and renamed, so a file that exists is complete; it contains a checksum of its
tensors. A file that cannot be read, or has another checksum, is computed again. The most recently used tensors stay in
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
from safetensors.torch import load_file
from safetensors.torch import save as serialize

from inweave.errors import FormatError
from inweave.files.paths import is_file
from inweave.files.writing import make_folder, write_atomic
from inweave.models.families.base import ENCODERS, Tensors
from inweave.models.model import Model

VERSION = 1  # incremented when the same facts lead to other tensors
MEMORY = 2 << 30  # bytes held in memory, if they are in a folder too
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: keys of a component's configuration that do not affect its outputs
_IRRELEVANT = ("architectures", "dtype", "torch_dtype", "transformers_version", "model_type")


class TensorCache:
    """Tensors by key; ``misses`` and ``hits`` count calls of `get`."""

    def __init__(self, folder: Path | None, memory: int = MEMORY) -> None:
        self._folder = folder
        self._limit = memory
        self._memory: dict[str, Tensors] = {}  # most recently used last
        self._bytes = 0
        self.misses = 0
        self.hits = 0

    def get(self, facts: object, make: Callable[[], Tensors]) -> Tensors:
        """Return the tensors for these facts; ``make`` computes them if they are not cached."""
        key = cache_key(facts)
        tensors = self._memory.get(key)
        if tensors is None:
            tensors = self._read(key)
        if tensors is None:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in make().items()}
            self.misses += 1
            self._write(key, tensors)
        else:
            self.hits += 1
        self._remember(key, tensors)
        return tensors

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
        if place is None or not is_file(place):
            return None
        try:
            tensors = load_file(place)
            with safe_open(place, "pt") as file:
                checksum = (file.metadata() or {}).get("sum")
        except (OSError, SafetensorError, ValueError):
            return None  # truncated by a crash: computed again and replaced
        return tensors if checksum == str(tensor_checksum(tensors)) else None

    def _write(self, key: str, tensors: Tensors) -> None:
        place = self._place(key)
        if place is None:
            return
        try:
            make_folder(place.parent)
            raw = serialize(tensors, {"sum": str(tensor_checksum(tensors))})
            write_atomic(place, [raw], durable=False)  # other processes may be writing the same file
        except FormatError as error:
            raise FormatError(f"{error}; it is a cache file: set cache_dir to another folder") from None


def cache_key(facts: object) -> str:
    """Return the key of these facts; tuples count as lists, paths as text."""
    text = json.dumps([VERSION, facts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def tensor_checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """Compute a checksum that changes with any bit of any tensor; not cryptographic."""
    total = 0
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, total)
    return total


def _size(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def tensor_bits(value: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as a row of integers."""
    return value.detach().contiguous().flatten().view(_INTEGERS[value.itemsize])


def sample_bits(bits: torch.Tensor) -> list[int]:
    """Pick about 64 of them, evenly spaced: enough to tell two models apart, and fast to read."""
    sample: list[int] = bits[:: max(bits.numel() // 64, 1)].tolist()
    return sample


def encoder_digests(model: Model) -> dict[str, str]:
    """Return digests of the VAE and of the text encoders: of their configuration and their weights."""
    digests = {}
    for name, folders in (("vae", ("vae",)), ("text", ENCODERS)):
        digest = hashlib.sha256()
        for folder in folders:
            if folder not in model.networks:
                continue
            part = model.blueprint.parts[folder]
            config = {k: v for k, v in part.config.items() if not k.startswith("_") and k not in _IRRELEVANT}
            digest.update(f"{part.class_name} {json.dumps(config, sort_keys=True, default=str)}".encode())
            for key, value in model.networks[folder].state_dict().items():
                bits = tensor_bits(value)
                total = int(bits.sum(dtype=torch.int64))
                digest.update(str((folder, key, value.dtype, tuple(value.shape), total, sample_bits(bits))).encode())
        digests[name] = digest.hexdigest()
    return digests
