"""Networks on disk: the files that make one up, and its tensors by plain reads.

NAME.safetensors                   one file
NAME.safetensors.index.json        the shards it names
a folder                           one network, and perhaps variants of it (fp16, ema)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from inweave.adapter import Tensor
from inweave.errors import FormatError
from inweave.files.reading import open_regular
from inweave.formats.files import read_header, shard_files, weight_files
from inweave.formats.gate import Header, TensorSpan
from inweave.ops.tensors.decode import TORCH, decode
from inweave.targets.plan import Rows
from inweave.weights.source import TensorSpec
from inweave.weights.transfer import read_bytes

PIECE = 16 * 1024**2  #: bytes read at a time where a whole tensor is not needed


@dataclass(frozen=True, slots=True)
class NetworkFiles:
    """One set of weights: a file, or shards and their index. A ``variant`` repeats the previous one in another form."""

    files: tuple[Path, ...]
    index: Path | None = None
    component: str | None = None  # None: any component with its names
    variant: bool = False


def network_at(path: Path, component: str | None = None, variant: bool = False) -> NetworkFiles:
    """Return the network in a file, or the one that an index of shards names."""
    if path.name.endswith(".index.json"):
        return NetworkFiles(tuple(shard_files(path)), path, component, variant)
    return NetworkFiles((path,), None, component, variant)


def networks_in(folder: Path, component: str | None = None) -> list[NetworkFiles]:
    """Return every set of safetensors weights in a folder, the one that is loaded first."""
    networks: list[NetworkFiles] = []
    for path in weight_files(folder):
        if not any(path in network.files for network in networks):
            networks.append(network_at(path, component, bool(networks)))
    return networks


class Pieces:
    """A network's tensors by plain reads: no page of the file stays mapped, and the caller owns the memory."""

    def __init__(self, network: NetworkFiles, opened: ExitStack) -> None:
        self.headers: dict[Path, Header] = {path: read_header(path) for path in network.files}
        self._where: dict[str, tuple[Path, TensorSpan]] = {}
        self._files: dict[Path, BinaryIO] = {}
        for path, header in self.headers.items():
            if twice := header.spans.keys() & self._where.keys():
                raise FormatError(f"{path}: tensor {min(twice)!r} is also in an earlier shard")
            self._files[path] = opened.enter_context(open_regular(path, buffering=0))
            self._where |= {name: (path, span) for name, span in header.spans.items()}

    def names(self) -> Collection[str]:
        return self._where.keys()

    def spec(self, name: str) -> TensorSpec:
        span = self._where[name][1]
        return TensorSpec(span.shape, TORCH[span.dtype])

    def get(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: Rows | None = None,
        owned: bool = True,
    ) -> torch.Tensor:
        span = self._where[name][1]
        start, length, shape = 0, span.end - span.begin, span.shape
        if rows is not None:
            stride = length // shape[0]
            start, length, shape = rows[0] * stride, rows[1] * stride, (rows[1], *shape[1:])
        return decode(self._part(name, start, length, shape), dtype=dtype or TORCH[span.dtype], device=device)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield a flattened tensor piece by piece."""
        span = self._where[name][1]
        size, item = span.end - span.begin, TORCH[span.dtype].itemsize
        for start in range(0, size, PIECE):
            length = min(PIECE, size - start)
            yield self._part(name, start, length, (length // item,))

    def _part(self, name: str, begin: int, length: int, shape: tuple[int, ...]) -> Tensor:
        path, span = self._where[name]
        offset = self.headers[path].data_start + span.begin + begin
        return Tensor(span.dtype, shape, read_bytes(self._files[path], offset, length))
