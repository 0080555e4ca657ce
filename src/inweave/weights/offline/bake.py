"""Bake: a stack of adapters merged into a checkpoint on disk, with the same bits as `MergedSource`.

    file     -> file      W' = round(W + sum_i strength_i * delta_i), tensor by tensor, under the same names
    shards   -> folder    every shard under its own name, and their index
    folder   -> folder    the weights of every network merged, everything else copied

The header comes first, then one tensor at a time. Base files are read in pieces and never mapped, so memory does not
grow with the checkpoint: the peak is the adapters plus a few times the largest tensor. One beyond `LARGE` (as
float32) that receives plain LoRA is merged in runs of rows; only there may sums differ in float32's last bit, since
the order of a matrix product depends on its size. A weight that is stored quantized is unpacked to float32, and the sum
quantized again, in the same form (`requantize`), or rounded to the dtype that is given. A file or folder appears under
its name when it is whole, until then under a hidden one. Metadata is kept, less hashes of the old contents;
`inweave.merged` lists the adapters.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from inweave.errors import ConfigError, FormatError, TargetError
from inweave.files.documents import read_json
from inweave.files.paths import exists, is_file, is_folder
from inweave.files.reading import open_regular
from inweave.files.writing import make_folder, new_folder, remove_folder, write_atomic
from inweave.formats.gate import parse_header
from inweave.formats.packed import Packed
from inweave.ops.tensors.decode import DTYPE_NAMES, TORCH, decode
from inweave.targets.index import ModelIndex
from inweave.targets.plan import Plan, Rows
from inweave.weights.blocks import block_names
from inweave.weights.checkpoint_files import PIECE, NetworkFiles, Pieces, network_at, networks_in
from inweave.weights.merge import is_product, refuse_overflow
from inweave.weights.merged import MergedSource
from inweave.weights.offline.requantize import requantized_parts
from inweave.weights.packed import PackedSource, unpack, unpacked_weight
from inweave.weights.source import TensorSpec
from inweave.weights.stack import Item, Strength, items_by_tensor

LARGE = 512 * 1024**2  #: bytes of one tensor as float32, above which it is merged in runs of rows
RUN = 256 * 1024**2  #: bytes of one such run as float32
Tick = Callable[[int], None]  #: bytes just written
_WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".msgpack", ".h5", ".onnx", ".onnx_data", ".gguf")
MERGED = "inweave.merged"  #: the key of the adapters in the metadata of a file
_OLD_HASHES = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")


@dataclass(frozen=True, slots=True)
class BakeItem:
    """One adapter of a stack, resolved on the base, with its name in the result's metadata."""

    plan: Plan
    strength: Strength
    name: str = ""
    sha256: str = ""


@dataclass(slots=True)
class Baked:
    """The files that `bake` wrote; ``left_out``: weights of the base folder that were not merged and so not copied.

    ``rounding_loss``: the fraction of the change that rounding lost, for each merged weight that is stored quantized.
    ``base``: the name of the base model, if it has one; ``loras``: the adapters as recorded in the metadata.
    """

    path: str
    tensors: int = 0
    merged: int = 0
    bytes: int = 0
    created: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    base: str | None = None
    loras: list[dict[str, object]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rounding_loss: dict[str, float] = field(default_factory=dict)


def record(name: str, sha256: str, strength: Strength) -> dict[str, object]:
    """Return the entry of an adapter in the metadata of a merged file."""
    parts = {"overall": strength.overall, **strength.components}
    return {"name": name, "sha256": sha256, "strength": parts if strength.components else strength.overall}


class _Job:
    """One network to write: the contents of each of its files, then the bytes."""

    def __init__(
        self,
        network: NetworkFiles,
        stack: Sequence[BakeItem],
        index: ModelIndex,
        dtype: torch.dtype | None,
        opened: ExitStack,
    ) -> None:
        pairs = [(item.plan, item.strength) for item in stack]
        self.network, self.stack, self.dtype = network, stack, dtype
        self.base = Pieces(network, opened)
        self.weights = unpack(self.base, network.files[0], dtype=torch.float32)
        self.source = MergedSource(self.weights, pairs, component=network.component, index=index)
        self.items: dict[str, list[Item]] = {}
        for (component, tensor), items in items_by_tensor(pairs, block_names(index)).items():
            if network.component in (None, component):
                self.items.setdefault(tensor, []).extend(items)
        known = self.weights.names()
        for name in self.items.keys() & known:
            self._refuse_unfit(name)
        self.roles: dict[
            str, tuple[str, str]
        ] = {}  # stored tensor -> the packed weight that changes, and its role in it
        self.rounding_loss: dict[str, float] = {}
        self._parts: tuple[str, dict[str, torch.Tensor]] = "", {}
        if dtype is None:
            for name in self.items:
                if (packed := self._packed(name)) is not None:
                    self.roles |= {stored: (name, role) for role, stored in packed.parts.items()}
        self.created = [name for name in self.items if name not in known]
        self.layout = {path: self._names(path) for path in network.files}
        self.bytes = sum(self._bytes(name) for names in self.layout.values() for name in names)

    def _refuse_unfit(self, name: str) -> None:
        spec, placement = self.weights.spec(name), self.items[name][0].placement
        if not placement.creates and spec.shape != placement.shape:
            raise TargetError(f"{name}: the plan expects {list(placement.shape)}, the file has {list(spec.shape)}")
        if placement.widen and self._packed(name) is not None:
            raise TargetError(
                f"{name}: stored quantized, and the adapter widens it; merge into the unquantized checkpoint"
            )
        if not spec.dtype.is_floating_point:
            raise TargetError(
                f"{name}: stored quantized ({DTYPE_NAMES[spec.dtype]}) in a way that inweave does not know; merge into "
                "the unquantized checkpoint"
            )

    def _packed(self, name: str) -> Packed | None:
        return self.weights.packed(name) if isinstance(self.weights, PackedSource) else None

    @property
    def unpacks(self) -> bool:
        """Whether weights that are stored quantized are written in another dtype."""
        return self.dtype is not None and isinstance(self.weights, PackedSource)

    def _spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of a tensor to write: of a stored one, unless packed weights are unpacked."""
        stored = not self.unpacks and name in self.base.names() and name not in self.items
        return self.base.spec(name) if stored or name in self.roles else self.source.spec(name)

    def _names(self, path: Path) -> list[str]:
        """Return the names in the base's order, but the widest dtypes first, so that every tensor is aligned."""
        spans = self.base.headers[path].spans
        known = self.weights.names()
        names = [
            *(name for name in spans if not self.unpacks or name in known),
            *(self.created if path == self.network.files[-1] else []),
        ]
        return sorted(names, key=lambda n: (-self._dtype(n).itemsize, spans[n].begin if n in spans else 0))

    def _dtype(self, name: str) -> torch.dtype:
        stored = self._spec(name).dtype
        fixed = not stored.is_floating_point or stored == torch.float8_e8m0fnu  # integers and quantization scales
        return stored if self.dtype is None or fixed else self.dtype

    def _bytes(self, name: str) -> int:
        return math.prod(self._spec(name).shape) * self._dtype(name).itemsize

    def chunks(self, path: Path, tick: Tick) -> Iterator[bytes | memoryview]:
        """Yield one file, header first."""
        metadata = {"format": "pt", **self.base.headers[path].metadata}
        if self.items:
            metadata = {key: value for key, value in metadata.items() if key not in _OLD_HASHES}
            added = [record(item.name, item.sha256, item.strength) for item in self.stack]
            metadata[MERGED] = json.dumps(history(metadata) + added)
        document: dict[str, object] = {"__metadata__": metadata}
        at = 0
        for name in self.layout[path]:
            begin, at = at, at + self._bytes(name)
            shape = list(self._spec(name).shape)
            document[name] = {"dtype": DTYPE_NAMES[self._dtype(name)], "shape": shape, "data_offsets": [begin, at]}
        raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        parse_header(raw, 8 + len(raw) + at)
        yield len(raw).to_bytes(8, "little") + raw
        for name in self.layout[path]:
            for piece in self._tensor(name, self._dtype(name)):
                yield piece
                tick(len(piece))

    def _tensor(self, name: str, dtype: torch.dtype) -> Iterator[memoryview]:
        items, shape = self.items.get(name), self._spec(name).shape
        if name in self.roles:
            yield self._requantized(name)
        elif not items and self.unpacks and self._packed(name) is not None:
            yield _bytes_of(name, self.weights.get(name, dtype=dtype), lambda: torch.zeros(1))
        elif not items:
            for piece in self.base.pieces(name):
                same = TORCH[piece.dtype] == dtype
                copy = partial(decode, piece)
                yield memoryview(piece.data) if same else _bytes_of(name, copy(dtype=dtype), copy)
        elif 4 * math.prod(shape) > LARGE and all(is_product(item.placement) for item in items):
            count = min(shape[0], -(-4 * math.prod(shape) // RUN))
            for start, stop in pairwise(shape[0] * number // count for number in range(count + 1)):
                yield self._merged(name, dtype, (start, stop - start))
        else:
            yield self._merged(name, dtype, None)

    def _merged(self, name: str, dtype: torch.dtype, rows: Rows | None) -> memoryview:
        def before() -> torch.Tensor:
            return torch.zeros(1) if name in self.created else self.weights.get(name, rows=rows)

        result = self.source.get(name, dtype=dtype, rows=rows)
        return _bytes_of(name, result, before)

    def _requantized(self, stored: str) -> memoryview:
        """Return a stored tensor of a changed, packed weight; the parts of one weight are computed together."""
        name, role = self.roles[stored]
        if self._parts[0] != name:
            packed = self._packed(name)
            assert packed is not None and isinstance(self.weights, PackedSource)
            before = self.weights.get(name, dtype=torch.float32)
            total = self.source.get(name, dtype=torch.float32)
            refuse_overflow(name, total, lambda: before)
            self._parts = name, requantized_parts(name, packed, self.weights.parts(packed), total)
            change = float((total - before).norm())
            rest = float((unpacked_weight(name, packed, self._parts[1]) - total).norm())
            self.rounding_loss[name] = rest / change if change else 0.0
        return memoryview(self._parts[1][role].contiguous().flatten().view(torch.uint8).numpy().data)

    def index_document(self, index: Path) -> bytes:
        """Return the index of the shards, with created tensors and the new size."""
        document = read_json(index)
        about = document.get("metadata")
        document["metadata"] = {**(about if isinstance(about, dict) else {}), "total_size": self.bytes}
        document["weight_map"] = {name: path.name for path, names in self.layout.items() for name in sorted(names)}
        return json.dumps(document, indent=2).encode() + b"\n"


def _bytes_of(name: str, result: torch.Tensor, before: Callable[[], torch.Tensor]) -> memoryview:
    """Return the bytes of a result; raise if it is not finite although its original was."""
    refuse_overflow(name, result, before)
    return memoryview(result.contiguous().flatten().view(torch.uint8).numpy().data)


def history(metadata: Mapping[str, str]) -> list[object]:
    """Return the adapters that an earlier bake merged already."""
    try:
        history = json.loads(metadata.get(MERGED, "[]"))
    except (ValueError, RecursionError):
        return []
    return history if isinstance(history, list) else []


def write_merged(
    base: str | os.PathLike[str],
    stack: Sequence[BakeItem],
    out: str | os.PathLike[str],
    *,
    index: ModelIndex,
    folders: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    replace: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Baked:
    """Write ``base`` with ``stack`` merged to ``out``, in ``dtype`` (None: every tensor in its own).

    ``folders``: which sub-folders of a diffusers model hold which components of ``index``. ``progress``: done, total.
    ``replace``: whether an existing model folder may be replaced.
    """
    source, target, done = Path(base), Path(out), Baked(os.fspath(out))
    one_file = is_file(source) and not source.name.endswith(".index.json")
    _check_target(source, target, one_file, replace)
    whole, copies = is_folder(source), list[Path]()
    networks = _scan(source, folders or {}, done, copies, dtype is not None) if whole else [network_at(source)]
    with ExitStack() as opened:
        jobs: list[_Job] = []
        for network in networks:
            try:
                jobs.append(_Job(network, stack, index, dtype, opened))
            except TargetError:
                if not network.variant:
                    raise
                done.left_out += map(str, network.files)  # next to the network's own weights: those of another network
        if whole and dtype is None:  # an unchanged network is copied
            copies += [path for job in jobs if not job.items for path in (*job.layout, job.network.index) if path]
            jobs = [job for job in jobs if job.items]
        total = sum(job.bytes for job in jobs)

        def tick(size: int) -> None:
            done.bytes += size
            progress(done.bytes, total)

        try:
            make_folder(target.absolute().parent)
            needed = total + sum(path.stat().st_size for path in copies)
            if (free := shutil.disk_usage(target.absolute().parent).free) < needed:
                raise ConfigError(f"{target}: needs {needed:,} bytes of disk space, {free:,} are free")
            if one_file:
                write_atomic(target, jobs[0].chunks(source, tick))
            else:
                _write_folder(target, source if whole else source.parent, jobs, copies, tick)
        except OSError as error:
            raise FormatError(f"{target}: cannot be written: {error.strerror}") from None
    done.tensors = sum(len(names) for job in jobs for names in job.layout.values())
    done.merged = sum(len(job.items) for job in jobs)
    done.created = [name for job in jobs for name in job.created]
    done.rounding_loss = {name: loss for job in jobs for name, loss in job.rounding_loss.items()}
    return done


def _write_folder(target: Path, root: Path, jobs: Sequence[_Job], copies: Sequence[Path], tick: Tick) -> None:
    with new_folder(target) as hidden:

        def at(path: Path) -> Path:
            path_there = hidden / path.relative_to(root)
            make_folder(path_there.parent)
            return path_there

        for job in jobs:
            for path in job.layout:
                write_atomic(at(path), job.chunks(path, tick))
            if job.network.index is not None:
                write_atomic(at(job.network.index), [job.index_document(job.network.index)])
        unpacked = {path.parent for job in jobs if job.unpacks for path in job.layout}
        for path in copies:
            if path.name == "config.json" and path.parent in unpacked:
                document = {key: value for key, value in read_json(path).items() if key != "quantization_config"}
                write_atomic(at(path), [json.dumps(document, indent=2).encode() + b"\n"])
                continue
            with open_regular(path) as file:
                write_atomic(at(path), iter(lambda: file.read(PIECE), b""))
        if exists(target):
            remove_folder(target)
        hidden.replace(target)


def _check_target(source: Path, target: Path, one_file: bool, replace: bool) -> None:
    if one_file != (target.suffix == ".safetensors"):
        form = "one file, so --out ends in .safetensors" if one_file else "several files, so --out names a folder"
        raise ConfigError(f"{target}: the base is {form}")
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise ConfigError(f"{target}: this is the base itself; choose another output")
    if one_file or not exists(target):
        return
    if not replace:
        raise ConfigError(f"{target}: already exists; choose another output, or replace it (--force)")
    if not any(target.glob("model_index.json")) and not any(target.glob("*.safetensors*")):
        raise ConfigError(f"{target}: not a model folder, and only model folders are replaced; choose another output")


def _scan(root: Path, folders: Mapping[str, str], done: Baked, copies: list[Path], convert: bool) -> list[NetworkFiles]:
    """Return the networks of a folder to merge or convert; everything else but other forms of these weights is
    copied.
    """
    homes: dict[Path, str | None] = {root / name: component for name, component in folders.items()} or {root: None}
    inside = [path for path in sorted(root.rglob("*")) if not {".git", ".cache"} & set(path.relative_to(root).parts)]
    if link := next((path for path in inside if path.is_dir() and path.is_symlink()), None):
        raise ConfigError(f"{link}: a symbolic link to a folder; use the folder it points to")
    folders_to_scan = dict.fromkeys([*homes, *(path for path in inside if convert and path.is_dir())])
    networks = [network for folder in folders_to_scan for network in networks_in(folder, homes.get(folder, "none"))]
    used, lost = {path for network in networks for path in (*network.files, network.index)}, list[Path]()
    for path in inside:
        if not path.is_dir() and path not in used:
            stale = path.suffix in _WEIGHTS and (path.parent in homes or path.parent == root)
            (copies if path.is_file() and not stale else lost).append(path)
    done.left_out += map(str, lost)
    return networks
