"""Bake into a GGUF file: the header with one more text, and the old data with the changed tensors in their places.

    tensor     begin, bytes, type as before        W' = encode(decode(W) + sum_i strength_i * delta_i)
    header     as before, and `inweave.merged`, the list of adapters
    .gguf      every type as it was; a type without an encoder (Q2_K, Q3_K) can be copied, not changed
    .safetensors   with a dtype: every tensor unpacked, under the same names

Data is copied in pieces, and one changed tensor at a time is in memory, in float32.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from inweave.errors import ConfigError, FormatError, TargetError
from inweave.files.reading import open_regular
from inweave.files.writing import make_folder, write_atomic
from inweave.formats.gate import parse_header
from inweave.formats.gguf import TYPES, GgufTensor, with_text
from inweave.ops.quantized.gguf import dequantized_blocks
from inweave.ops.quantized.gguf_encoding import ENCODERS, encoded_like
from inweave.ops.tensors.decode import DTYPE_NAMES, TORCH
from inweave.targets.index import ModelIndex
from inweave.weights.blocks import block_names
from inweave.weights.checkpoint_files import PIECE
from inweave.weights.merge import refuse_overflow
from inweave.weights.merged import MergedSource
from inweave.weights.offline.bake import MERGED, Baked, BakeItem, Tick, history, record
from inweave.weights.packed import GgufSource
from inweave.weights.stack import Item, items_by_tensor


def write_merged_gguf(
    base: str | os.PathLike[str],
    stack: Sequence[BakeItem],
    out: str | os.PathLike[str],
    *,
    index: ModelIndex,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Baked:
    """Write the GGUF file ``base`` with ``stack`` merged to ``out``, in its types, or all in ``dtype``.

    Raises:
        TargetError: an adapter changes a tensor that cannot be written in its type.
        ConfigError: ``out`` is not a file of the form that is written.
        FormatError: the file cannot be read, or ``out`` cannot be written.
    """
    source, target, done = GgufSource(base, torch.float32), Path(out), Baked(os.fspath(out))
    _check_target(source.path, target, dtype)
    job = _GgufJob(source, stack, index)
    total = job.size(dtype)

    def tick(size: int) -> None:
        done.bytes += size
        progress(done.bytes, total)

    try:
        make_folder(target.absolute().parent)
        if (free := shutil.disk_usage(target.absolute().parent).free) < total:
            raise ConfigError(f"{target}: needs {total:,} bytes of disk space, {free:,} are free")
        write_atomic(target, job.gguf(tick) if dtype is None else job.safetensors(dtype, tick))
    except OSError as error:
        raise FormatError(f"{target}: cannot be written: {error.strerror}") from None
    done.tensors, done.merged, done.rounding_loss = len(source.names()), len(job.items), job.rounding_loss
    return done


def _check_target(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    suffix = ".gguf" if dtype is None else ".safetensors"
    if target.suffix != suffix:
        other = (
            "--dtype bf16 with a name that ends in .safetensors unpacks it"
            if dtype is None
            else "without --dtype its tensors keep their types, in a .gguf file"
        )
        raise ConfigError(f"{target}: the base is a GGUF file, so --out ends in {suffix} here; {other}")
    if source.resolve() == target.resolve():
        raise ConfigError(f"{target}: this is the base itself; choose another output")


class _GgufJob:
    """The contents of the merged file. ``items``: tensor -> what is added to it."""

    def __init__(self, source: GgufSource, stack: Sequence[BakeItem], index: ModelIndex) -> None:
        self.source, self.stack = source, stack
        pairs = [(item.plan, item.strength) for item in stack]
        self.merged = MergedSource(source, pairs, component=None, index=index)
        self.items: dict[str, list[Item]] = {}
        for (_, tensor), items in items_by_tensor(pairs, block_names(index)).items():
            self.items.setdefault(tensor, []).extend(items)
        self.rounding_loss: dict[str, float] = {}
        self._tensors: Mapping[str, GgufTensor] = source.header.tensors
        for name in self.items:
            self._refuse_unfit(name)

    def _refuse_unfit(self, name: str) -> None:
        tensor, placement = self._tensors.get(name), self.items[name][0].placement
        if tensor is None:
            raise TargetError(f"{name}: an adapter adds this tensor, and a GGUF file keeps the tensors it has")
        if placement.widen:
            raise TargetError(f"{name}: an adapter widens this tensor, and a GGUF file keeps the shapes it has")
        if tensor.shape != placement.shape:
            raise TargetError(f"{name}: the plan expects {list(placement.shape)}, the file has {list(tensor.shape)}")

    def size(self, dtype: torch.dtype | None) -> int:
        """Return the bytes of the tensors to write."""
        if dtype is None:
            return self.source.path.stat().st_size - self.source.header.data
        return sum(math.prod(tensor.shape) for tensor in self._tensors.values()) * dtype.itemsize

    def gguf(self, tick: Tick) -> Iterator[bytes | memoryview]:
        """Yield the file, header first."""
        unwritable = [n for n in self.items if TYPES[self._tensors[n].type][0] > 1 and not self._encodes(n)]
        if unwritable:
            raise TargetError(
                f"{unwritable[0]}: stored as {self._tensors[unwritable[0]].type} ({len(unwritable)} of the tensors to "
                f"change), to which inweave does not quantize a sum; it writes {', '.join(ENCODERS)}. Write a "
                ".safetensors file with --dtype bf16, or merge into a GGUF file of another type"
            )
        header, path = self.source.header, self.source.path
        yield with_text(path, header, MERGED, self._history(header.texts))
        places = sorted(self.items, key=lambda name: self._tensors[name].begin)
        self._refuse_overlaps(places)
        at = header.data
        for name in places:
            tensor = self._tensors[name]
            yield from _copy(path, at, tensor.begin, tick)
            piece = self._encoded(name, tensor)
            yield piece
            tick(len(piece))
            at = tensor.begin + tensor.size
        yield from _copy(path, at, path.stat().st_size, tick)

    def safetensors(self, dtype: torch.dtype, tick: Tick) -> Iterator[bytes | memoryview]:
        """Yield a file with every tensor in one dtype, header first."""
        about = {"format": "pt", MERGED: self._history(self.source.header.texts)}
        document: dict[str, object] = {"__metadata__": about}
        at = 0
        for name, tensor in self._tensors.items():
            begin, at = at, at + math.prod(tensor.shape) * dtype.itemsize
            document[name] = {"dtype": DTYPE_NAMES[dtype], "shape": [*tensor.shape], "data_offsets": [begin, at]}
        raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        parse_header(raw, 8 + len(raw) + at)
        yield len(raw).to_bytes(8, "little") + raw
        for name in self._tensors:
            read = self.merged if name in self.items else self.source
            numbers = read.get(name, dtype=dtype)
            refuse_overflow(name, numbers, lambda name=name: self.source.get(name, dtype=torch.float32))  # type: ignore[misc]
            piece = _bytes_of(numbers)
            yield piece
            tick(len(piece))

    def _encodes(self, name: str) -> bool:
        return self._tensors[name].type in ENCODERS

    def _history(self, texts: Mapping[str, str]) -> str:
        added = [record(item.name, item.sha256, item.strength) for item in self.stack]
        return json.dumps(history(texts) + added)

    def _refuse_overlaps(self, places: Sequence[str]) -> None:
        """Refuse a file in which the bytes of a changed tensor are also those of another one."""
        widest, end = "", 0
        for name, tensor in sorted(self._tensors.items(), key=lambda each: each[1].begin):
            if tensor.size and tensor.begin < end and not {name, widest}.isdisjoint(places):
                raise FormatError(
                    f"{self.source.path}: {widest} and {name} share bytes, and an adapter changes one of them"
                )
            if tensor.begin + tensor.size > end:
                widest, end = name, tensor.begin + tensor.size

    def _encoded(self, name: str, tensor: GgufTensor) -> memoryview:
        before = self.source.get(name, dtype=torch.float32)
        total = self.merged.get(name, dtype=torch.float32)
        refuse_overflow(name, total, lambda: before)
        if tensor.type in TORCH:
            stored = total.to(TORCH[tensor.type])
            refuse_overflow(name, stored, lambda: before)
            return _bytes_of(stored)
        block, size = TYPES[tensor.type]
        stored = encoded_like(tensor.type, total.reshape(-1, block), self.source.stored(name).view(-1, size))
        change = float((total - before).norm())
        rest = float((dequantized_blocks(tensor.type, stored.view(-1, size)).view(total.shape) - total).norm())
        self.rounding_loss[name] = rest / change if change else 0.0
        return _bytes_of(stored)


def _copy(path: Path, begin: int, end: int, tick: Tick) -> Iterator[bytes]:
    with open_regular(path) as file:
        file.seek(begin)
        while begin < end:
            piece = file.read(min(PIECE, end - begin))
            if not piece:
                raise FormatError(f"{path}: changed on disk since it was opened")
            begin += len(piece)
            yield piece
            tick(len(piece))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
