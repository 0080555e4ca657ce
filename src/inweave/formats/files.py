"""Containers: conversion between files and named tensors.

    .safetensors                        one file: header gate, then a read-only memory map
    NAME.safetensors.index.json         shards in the same directory
    a directory                         PEFT (adapter_config.json), diffusers LoRA, or shards

Pickles (.pt, .bin, .ckpt, or with any other extension) are identified by their first bytes and rejected, because
unpickling can run arbitrary code.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from inweave.adapter import Tensor
from inweave.errors import FormatError
from inweave.files.documents import read_json
from inweave.files.paths import as_path, is_file, mode_of, occupied
from inweave.files.reading import open_regular
from inweave.files.writing import write_atomic
from inweave.formats.gate import Header, header_length, parse_header

ADAPTER_FILES = ("adapter_model.safetensors", "adapter.safetensors", "pytorch_lora_weights.safetensors")
PICKLE_NAMES = ("adapter_model.bin", "pytorch_lora_weights.bin")

_CONVERT_PICKLE = (
    "It is a pickle, which can run code when opened, so inweave never opens one. Convert it where that is safe "
    "(an isolated machine): load it there with torch's weights-only loader and save the tensors with "
    "safetensors.torch.save_file, then use the .safetensors file here"
)


@dataclass(frozen=True, slots=True)
class Container:
    """Named tensors with their metadata and, for PEFT directories, the configuration."""

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] | None = None
    files: tuple[Path, ...] = ()
    places: Mapping[str, tuple[Path, int]] = field(default_factory=dict)  # file and offset of each tensor


def open_container(path: str | os.PathLike[str], *, mapped: bool = True) -> Container:
    """Open a file, an index of shards, or a directory.

    ``mapped``: tensors are views of a memory map, read on access. Otherwise they are read into memory now, so that they
    survive a later truncation of the file; accessing a truncated map would kill the process.
    """
    source = as_path(path)
    mode = mode_of(source)
    if stat.S_ISDIR(mode):
        try:
            return _open_directory(source, mapped)
        except OSError as error:
            raise FormatError(f"{source}: {error.strerror}") from None
    if source.name.endswith(".index.json"):
        return _open_shards(source, mapped)
    config = source.parent / "adapter_config.json"
    container = _open_file(source, mapped)
    if source.name in ADAPTER_FILES[:2] and occupied(config):
        return replace(container, config=read_json(config))
    return container


def read_header(path: str | os.PathLike[str]) -> Header:
    """Return names, shapes and metadata of one safetensors file; no tensor data is read."""
    source = as_path(path)
    with open_regular(source) as file:
        return _header(source, file)


def _open_file(path: Path, mapped: bool) -> Container:
    with open_regular(path) as file:  # once, so that header and data match even if the file is replaced meanwhile
        header = _header(path, file)
        # a private map: array libraries accept its buffer without a copy, and the file is never modified
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)) if mapped else _read_whole(path, file)
    start = header.data_start
    tensors = {
        name: Tensor(span.dtype, span.shape, view[start + span.begin : start + span.end])
        for name, span in header.spans.items()
    }
    places = {name: (path, start + span.begin) for name, span in header.spans.items()}
    return Container(path, tensors, header.metadata, None, (path,), places)


def _read_whole(path: Path, file: BinaryIO) -> memoryview:
    """Read a file into anonymous memory."""
    view = memoryview(mmap.mmap(-1, os.fstat(file.fileno()).st_size))
    file.seek(0)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise FormatError(f"{path}: ends after {done:,} of {len(view):,} bytes; it was truncated while it was read")
        done += count
    return view


def maps_of(tensors: Iterable[Tensor]) -> list[mmap.mmap]:
    """Return the mapped files that tensors are views of, each once."""
    views = (tensor.data for tensor in tensors if isinstance(tensor.data, memoryview))
    return list({id(view.obj): view.obj for view in views if isinstance(view.obj, mmap.mmap)}.values())


def refuse_truncated(maps: Iterable[mmap.mmap], name: object = "a mapped file") -> None:
    """Raise FormatError if a file is shorter than its map: accessing the missing part would kill the process."""
    for each in maps:
        try:
            size = each.size()
        except OSError:  # anonymous memory
            continue
        if size < len(each):
            raise FormatError(f"{name}: was truncated from {len(each):,} to {size:,} bytes since it was opened")


def _header(path: Path, file: BinaryIO) -> Header:
    raw, size = header_bytes(path, file)
    try:
        return parse_header(raw, size)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def header_bytes(path: Path, file: BinaryIO) -> tuple[bytes, int]:
    """Return (the unparsed JSON of a header, the size of the file)."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(64)
    _refuse_other_formats(path, prefix, size)
    try:
        length = header_length(prefix, size)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    file.seek(8)
    raw = file.read(length)
    if len(raw) != length:
        raise FormatError(f"{path}: the header ends after {len(raw):,} of {length:,} bytes")
    return raw, size


def weight_files(folder: Path) -> list[Path]:
    """Return the indexes of shards and the safetensors files of a folder, in order of preference.

    Shards come before single files, and the plain name before its variants (`model.fp16.safetensors`).
    """
    paths = [*folder.glob("*.safetensors.index.json"), *folder.glob("*.safetensors")]
    return sorted(paths, key=lambda path: (path.suffix != ".json", len(path.name), path.name))


def network_file(folder: Path) -> Path | None:
    """Return the weights of a folder: its index of shards, or its file."""
    return next(iter(weight_files(folder)), None)


def shard_files(index: Path) -> list[Path]:
    """Return the files that an index of shards lists, all in the same directory."""
    return _shards(index, _weight_map(index))


def _weight_map(index: Path) -> dict[str, str]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
        raise FormatError(f"{index}: no weight_map of tensor names to file names")
    return mapping


def _shards(index: Path, mapping: Mapping[str, str]) -> list[Path]:
    names = sorted(set(mapping.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise FormatError(f"{index}: shard {name!r} is not the name of a .safetensors file next to the index")
    return [index.parent / name for name in names]


def _open_shards(index: Path, mapped: bool) -> Container:
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    places: dict[str, tuple[Path, int]] = {}
    mapping = _weight_map(index)
    files = _shards(index, mapping)
    for shard in files:
        part = _open_file(shard, mapped)
        twice = next((name for name in part.tensors if name in tensors), None)
        if twice is not None:
            raise FormatError(f"{shard}: tensor {twice!r} is also in an earlier shard")
        tensors.update(part.tensors)
        metadata.update(part.metadata)
        places.update(part.places)
    absent = next((name for name in mapping if name not in tensors), None)
    if absent is not None:
        raise FormatError(f"{index}: tensor {absent!r} should be in {mapping[absent]}, but no shard holds it")
    return Container(index, tensors, metadata, None, tuple(files), places)


def _open_directory(path: Path, mapped: bool) -> Container:
    config_path = path / "adapter_config.json"
    config = read_json(config_path) if occupied(config_path) else None
    for name in ADAPTER_FILES:
        if occupied(path / name):
            container = _open_file(path / name, mapped)
            return replace(container, path=path, config=config)
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) == 1:
        container = _open_shards(indexes[0], mapped)
        return replace(container, path=path, config=config)
    single = sorted(path.glob("*.safetensors"))
    if len(single) == 1:
        container = _open_file(single[0], mapped)
        return replace(container, path=path, config=config)
    for name in PICKLE_NAMES:
        if is_file(path / name):
            raise FormatError(f"{path / name}: cannot be read. {_CONVERT_PICKLE}")
    adapters = sorted(sub.name for sub in path.iterdir() if is_file(sub / "adapter_config.json"))
    if adapters:
        raise FormatError(f"{path}: holds the adapters {', '.join(adapters)}; name one of these directories")
    if len(single) > 1:
        raise FormatError(f"{path}: holds {len(single)} .safetensors files; name one of them")
    raise FormatError(f"{path}: a directory without an adapter ({', '.join(ADAPTER_FILES)})")


def _refuse_other_formats(path: Path, head: bytes, size: int) -> None:
    if size == 0:
        raise FormatError(f"{path}: the file is empty; download or copy it again")
    if head.startswith(b"version https://git-lfs"):
        raise FormatError(f"{path}: a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'")
    if head.startswith(b"\x93NUMPY") or (head.startswith(b"PK\x03\x04") and _is_numpy_archive(path, head)):
        raise FormatError(
            f"{path}: NumPy arrays (.npz, .npy), not a safetensors file; load them with numpy (allow_pickle=False) and "
            "save them with safetensors.numpy.save_file, then use the .safetensors file here"
        )
    if head.startswith(b"PK\x03\x04") or _looks_like_pickle(head):
        raise FormatError(f"{path}: not a safetensors file. {_CONVERT_PICKLE}")
    if (image := _image_format(head)) is not None:
        raise FormatError(
            f"{path}: an image ({image}), not a model or an adapter; `inweave generate --from` repeats an image"
        )
    if head.startswith(b"GGUF"):
        raise FormatError(
            f"{path}: a GGUF file, which holds a quantized model or a llama.cpp adapter; only safetensors "
            "adapters and bases are read: use the file it was converted from"
        )
    if head.lstrip()[:1] == b"<" and not _looks_like_safetensors(head):
        raise FormatError(f"{path}: a web page, not an adapter; the download probably needs a login")
    if path.suffix.lower() in (".pt", ".pth", ".bin", ".ckpt") and not _looks_like_safetensors(head):
        raise FormatError(f"{path}: not a safetensors file. {_CONVERT_PICKLE}")


_IMAGES = {b"\x89PNG\r\n": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF8": "GIF", b"II*\0": "TIFF", b"MM\0*": "TIFF"}


def _image_format(head: bytes) -> str | None:
    """Return the format of an image from its first bytes, or None; a safetensors file begins with its header length."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP"
    if head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"heic", b"mif1", b"heix"):
        return "AVIF" if head[8:12] == b"avif" else "HEIC"
    known = next((name for mark, name in _IMAGES.items() if head.startswith(mark)), None)
    return None if known is None or _looks_like_safetensors(head) else known


def _is_numpy_archive(path: Path, head: bytes) -> bool:
    """Return whether the first member of a ZIP archive is an array, by its name, or the file's if ``head`` cuts it."""
    length = int.from_bytes(head[26:28], "little")
    member = head[30 : 30 + length]
    return member.endswith(b".npy") if len(member) == length else path.suffix.lower() == ".npz"


_PROTOCOLS = (b"\x01", b"\x02", b"\x03", b"\x04", b"\x05")
#: protocols 0 and 1 have no marker: they begin with a stored dict, list or global
_UNMARKED_PICKLE = re.compile(rb"\(*(?:[dl]p0\n|[}\]]q\x00|[ci][\w.]+\n[\w.]+\n[pq()])")


def _looks_like_pickle(head: bytes) -> bool:
    """Return whether a file begins with a pickle's protocol marker that is not a header length followed by JSON."""
    marked = head[:1] == b"\x80" and head[1:2] in _PROTOCOLS
    return (marked or _UNMARKED_PICKLE.match(head) is not None) and not _looks_like_safetensors(head)


def _looks_like_safetensors(head: bytes) -> bool:
    return head[8:9] == b"{"


def write_file(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a safetensors file atomically: a reader sees the old file or the complete new one."""
    target = Path(path)
    document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    names = _aligned_order(tensors)
    for name in names:
        tensor = tensors[name]
        end = position + len(tensor.data)
        document[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    try:
        raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise FormatError(f"{target}: a name or metadata cannot be written as text: {error.reason}") from None
    raw += b" " * (-len(raw) % 8)  # aligns the data to 8 bytes for memory maps
    prefix = len(raw).to_bytes(8, "little")
    parse_header(raw[: header_length(prefix, 8 + len(raw))], 8 + len(raw) + position)
    chunks = [prefix, raw, *(tensors[name].data for name in names)]
    return write_atomic(target, chunks)


def _aligned_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names by descending dtype width, then by name, so that every tensor is aligned to its element size."""
    return sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
