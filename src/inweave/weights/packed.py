"""Packed checkpoints as sources: their weights are unpacked one by one, while they are read.

    scaled       W = number * scale                            one scale, per row, or per block of 128 x 128
    bnb int8     W = number * largest of the row / 127
    bnb 4 bit    W = book[code] * largest of the block         the upper half of a byte first; the largest numbers may
                                                               be packed too: map[byte] * largest + offset
    GGUF         `inweave.ops.quantized.gguf`

`inweave.formats.packed` finds them. Numbers are unpacked in float32 and rounded once; a network whose layers are
quantized afterwards (`quantize`) never exists in 16 bits as a whole.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inweave.errors import FormatError, TargetError
from inweave.files.paths import as_path, is_file
from inweave.files.reading import open_regular
from inweave.files.stamps import stamp_of
from inweave.formats.base_shapes import refuse_renamed
from inweave.formats.gguf import TYPES, GgufTensor, is_gguf, read_gguf
from inweave.formats.packed import BLOCK, LONGEST_STATE, Packed, Packing, blocks_of, packing_of
from inweave.ops.quantized import PACKED_FORMATS, QuantizedWeight
from inweave.ops.quantized.gguf import dequantized_blocks
from inweave.ops.quantized.nf4 import unpacked
from inweave.ops.tensors.decode import DTYPE_NAMES, TORCH
from inweave.targets.plan import Rows
from inweave.weights.held import quantized_weight, stored_weight
from inweave.weights.source import FileSource, TensorSpec, WeightSource, stamps_of
from inweave.weights.transfer import read_bytes
from inweave.weights.views import viewed_in

_WIDE = torch.float32


def open_source(path: str | os.PathLike[str]) -> WeightSource:
    """Return the weights of a file, shards or a folder, unpacked if they are packed.

    Raises:
        FormatError: a file cannot be read, or is packed in a way that inweave does not unpack.
    """
    file = as_path(path)
    if is_file(file) and is_gguf(file):
        return GgufSource(file)
    return unpack(FileSource(file), file)


def unpack(source: WeightSource, file: object, dtype: torch.dtype | None = None) -> WeightSource:
    """Return a source of stored tensors as the weights that they make up; itself if none is packed.

    ``dtype``: of packed weights; None: the one that their file names.

    Raises:
        FormatError: the weights are packed in a way that inweave does not unpack; ``file`` names it.
    """
    stored = {name: _Stored(DTYPE_NAMES[(spec := source.spec(name)).dtype], spec.shape) for name in source.names()}
    refuse_renamed(file, stored)
    try:
        packing = packing_of(stored, lambda name: source.get(name, owned=True).numpy().tobytes()[:LONGEST_STATE])
    except FormatError as error:
        raise FormatError(f"{file}: {error}") from None
    refused = [(name, each.refused) for name, each in packing.weights.items() if each.refused]
    if refused:
        raise FormatError(
            f"{file}: {refused[0][0]} is stored as {refused[0][1]} ({len(refused)} weights), which inweave does not "
            "unpack; use the model in bf16, fp16, fp8, bitsandbytes' 4 or 8 bits, or GGUF (Q2_K to Q8_0)"
        )
    return PackedSource(source, packing, dtype) if packing.weights or packing.companions else source


class _Stored(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def source_shapes(source: WeightSource) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a source."""
    return {name: source.spec(name).shape for name in source.names()}


def packed_summary(source: WeightSource) -> str:
    """Return how the weights of a source are packed, such as "504 of 780 tensors as scaled F8_E4M3"; "" if not."""
    kinds = getattr(source, "kinds", None)
    if not kinds:
        return ""
    listing = ", ".join(f"{count} as {kind}" for kind, count in kinds.most_common())
    return f"of its {len(source.names()):,} tensors {listing}"


class PackedSource:
    """A safetensors checkpoint with packed weights, under the names and shapes of the model.

    Args:
        source: The stored tensors.
        packing: Which of them make up weights.
        dtype: Of packed weights; None: the one that their file names.
    """

    def __init__(self, source: WeightSource, packing: Packing, dtype: torch.dtype | None = None) -> None:
        self._source, self._packed, self._dtype = source, packing.weights, dtype
        self.metadata: Mapping[str, str] = getattr(source, "metadata", {})
        self.stamps, self.viewed = stamps_of(source), viewed_in(source)
        self._names = {name: None for name in source.names() if name not in packing.companions}
        self.kinds = Counter(each.kind for each in packing.weights.values())

    def names(self) -> Collection[str]:
        """Return the names of all weights."""
        return self._names.keys()

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of one weight, without reading its data."""
        packed = self._known(name)
        return (
            self._source.spec(name) if packed is None else TensorSpec(packed.shape, self._dtype or TORCH[packed.dtype])
        )

    def get(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: Rows | None = None,
        owned: bool = False,
    ) -> torch.Tensor:
        """Return one weight; see `WeightSource.get`."""
        packed = self._known(name)
        if packed is None:
            return self._source.get(name, dtype=dtype, device=device, rows=rows, owned=owned)
        parts = self.parts(packed, device)
        weight = unpacked_weight(name, packed, parts).to(dtype or self.spec(name).dtype)
        return weight if rows is None else weight[rows[0] : sum(rows)].clone()

    def packed(self, name: str) -> Packed | None:
        """Return how a weight is packed; None if it is stored plain."""
        return self._packed.get(name)

    def parts(self, packed: Packed, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return the stored tensors of a weight by role, by plain reads, which notice a file that changed."""
        return {role: self._source.get(stored, device=device, owned=True) for role, stored in packed.parts.items()}

    def quantized(self, name: str, device: torch.device | str, rows: Rows | None = None) -> QuantizedWeight | None:
        """Return the quantized weight without dequantizing it; see `quantized_weight`."""
        packed = self._known(name)
        if packed is None:
            return quantized_weight(self._source, name, device, rows)
        if torch.device(device).type == "meta":
            specs = {role: self._source.spec(stored) for role, stored in packed.parts.items()}
            parts = {role: torch.empty(each.shape, dtype=each.dtype, device=device) for role, each in specs.items()}
        else:
            parts = self.parts(packed, device)
        weight: Any = stored_weight(packed, parts)
        if rows is None or weight is None:
            return weight  # type: ignore[no-any-return]
        # a copy of the rows, so that the rest can be freed
        return type(weight)(*(tensor.clone() for tensor in weight.part(*rows)))  # type: ignore[no-any-return]

    def _known(self, name: str) -> Packed | None:
        if name not in self._names:
            raise TargetError(f"the source has no tensor {name!r} ({len(self._names):,} others)")
        return self._packed.get(name)


def unpacked_weight(name: str, packed: Packed, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a weight in float32."""
    numbers = parts["numbers"]
    if packed.kind == "bitsandbytes int8":
        if parts["scales"].numel() != len(numbers):
            raise FormatError(f"{name}: {parts['scales'].numel()} scales for {len(numbers)} rows")
        return numbers.to(_WIDE) * (parts["scales"].to(_WIDE).view(-1, 1) / 127)
    if packed.kind.startswith("bitsandbytes"):
        return _four_bits(name, packed, parts)
    scales = parts["scales"].to(_WIDE)
    if scales.numel() > 1 and scales.shape == blocks_of(numbers.shape):
        for axis, side in enumerate(numbers.shape):
            scales = scales.repeat_interleave(BLOCK, axis).narrow(axis, 0, side)
    else:
        scales = scales.view(-1, *[1] * (numbers.dim() - 1))
    return numbers.to(_WIDE) * scales


def _four_bits(name: str, packed: Packed, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    count, block = math.prod(packed.shape), packed.state["block"]
    largest, book = parts["absmax"].flatten(), parts["quant_map"].to(_WIDE).flatten()
    if nested := packed.state["nested_block"]:
        outer = parts["nested_absmax"].to(_WIDE).flatten()
        inner = parts["nested_quant_map"].to(_WIDE).flatten()
        if largest.dtype != torch.uint8 or inner.numel() != 256 or outer.numel() != -(-largest.numel() // nested):
            raise FormatError(f"{name}: its nested scales are not those of bitsandbytes")
        outer = outer.repeat_interleave(nested)[: largest.numel()]
        largest = inner[largest.int()] * outer + packed.state["offset"]
    if book.numel() != 16 or largest.numel() != -(-count // block):
        raise FormatError(f"{name}: {largest.numel()} scales of {block} numbers, and a map of {book.numel()} values")
    values = book[unpacked(parts["numbers"].flatten().view(torch.uint8)).int()][:count]
    return (values * largest.to(_WIDE).repeat_interleave(block)[:count]).view(packed.shape)


class GgufSource:
    """A GGUF file. Tensors are read and unpacked on demand.

    Args:
        path: The file.
        dtype: Of packed weights, which have none of their own.

    Raises:
        FormatError: The file is damaged, or has tensors of a type that inweave does not unpack.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: torch.dtype = torch.bfloat16) -> None:
        self.path, self._dtype = Path(path).absolute(), dtype
        self.header = read_gguf(self.path)
        self._tensors = self.header.tensors
        self.kinds = Counter(tensor.type for tensor in self._tensors.values())
        if unknown := [(name, each.type) for name, each in self._tensors.items() if each.type not in TYPES]:
            raise FormatError(
                f"{path}: {unknown[0][0]} is stored as {unknown[0][1]} ({len(unknown)} tensors), which inweave does "
                f"not unpack; it reads {', '.join(TYPES)}"
            )
        status = self.path.stat()
        size, self.stamps = status.st_size, {self.path: stamp_of(status)}
        for name, each in self._tensors.items():
            block = TYPES[each.type][0]
            if math.prod(each.shape) % block or each.begin + each.size > size:
                raise FormatError(f"{path}: {name} {list(each.shape)} does not fit into the file; it is damaged")

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._tensors.keys()

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of one tensor, without reading its data."""
        tensor = self._known(name)
        return TensorSpec(tensor.shape, TORCH.get(tensor.type, self._dtype))

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
        tensor = self._known(name)
        block, size = TYPES[tensor.type]
        shape, start, length = tensor.shape, 0, tensor.size
        stride = math.prod(shape[1:])
        whole_blocks = stride % block == 0
        if rows is not None and whole_blocks:
            start, length = (count * stride // block * size for count in rows)
            shape, rows = (rows[1], *shape[1:]), None
        bytes_ = self._bytes(tensor, start, length)
        numbers = dequantized_blocks(tensor.type, bytes_.to(device).view(-1, size)).view(shape)
        result = numbers.to(dtype or self.spec(name).dtype)
        return result if rows is None else result[rows[0] : sum(rows)].clone()

    def quantized(self, name: str, device: torch.device | str, rows: Rows | None = None) -> QuantizedWeight | None:
        """Return the quantized weight without dequantizing it; see `quantized_weight`."""
        tensor = self._known(name)
        block, size = TYPES[tensor.type]
        into = math.prod(tensor.shape[1:])
        if block == 1 or len(tensor.shape) < 2 or into % block:
            return None
        start, count = rows or (0, tensor.shape[0])
        shape = count, into // block * size
        if torch.device(device).type == "meta":
            blocks = torch.empty(shape, dtype=torch.uint8, device=device)
        else:
            blocks = self._bytes(tensor, start * shape[1], math.prod(shape)).to(device).view(shape)
        weight: QuantizedWeight = PACKED_FORMATS[f"gguf-{tensor.type}"].weights(blocks)
        return weight

    def stored(self, name: str) -> torch.Tensor:
        """Return the bytes of a tensor."""
        tensor = self._known(name)
        return self._bytes(tensor, 0, tensor.size)

    def _bytes(self, tensor: GgufTensor, start: int, length: int) -> torch.Tensor:
        with open_regular(self.path, buffering=0) as file:
            if stamp_of(os.fstat(file.fileno())) != self.stamps[self.path]:
                raise FormatError(f"{self.path}: changed on disk since it was opened; build the model again")
            raw = read_bytes(file, tensor.begin + start, length)
        return torch.frombuffer(raw, dtype=torch.uint8) if length else torch.empty(0, dtype=torch.uint8)

    def _known(self, name: str) -> GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise TargetError(f"the source has no tensor {name!r} ({len(self._tensors):,} others)")
        return tensor
