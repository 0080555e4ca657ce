"""Weights as GGUF files store them: the bytes of their blocks, one class for each type of ggml.

blocks (out, in / numbers of a block * its bytes)        decoded by `gguf`, other numbers encoded by `gguf_encoding`
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from inweave.ops.quantized.dequantizing import Dequantizing, PackedLinear, in_pieces
from inweave.ops.quantized.gguf import SIZES, dequantized_blocks
from inweave.ops.quantized.gguf_encoding import ENCODERS, encoded_blocks, encoded_like

_PREFIX = "gguf-"


class _Tensors(NamedTuple):
    blocks: Tensor


class GgufWeight(Dequantizing, _Tensors):
    """A weight (out, in) in blocks of one type."""

    __slots__ = ()
    type: ClassVar[str]
    encodes: ClassVar[bool]

    def format(self) -> str:
        """Return the format's name."""
        return f"{_PREFIX}{self.type}"

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return (out, in)."""
        count, size = SIZES[self.type]
        blocks, into = self.blocks, self.blocks.shape[1] // size * count

        def rows(part: slice) -> Tensor:
            return dequantized_blocks(self.type, blocks[part].reshape(-1, size)).view(-1, into)

        return in_pieces((len(blocks), into), dtype, blocks.device, rows)

    @classmethod
    def of(cls, weight: Tensor) -> GgufWeight:
        """Quantize a matrix whose rows are whole blocks, to a type with an encoder."""
        return cls(encoded_blocks(cls.type, weight.float().reshape(-1, SIZES[cls.type][0])).view(len(weight), -1))

    def like(self, weight: Tensor) -> GgufWeight:
        """Quantize other numbers; a block keeps its scales where these round with a smaller error."""
        count, size = SIZES[self.type]
        blocks = encoded_like(self.type, weight.float().reshape(-1, count), self.blocks.reshape(-1, size))
        return type(self)(blocks.view(len(weight), -1))


def _layer_of(type_: str) -> type[PackedLinear]:
    """Return the layer of a type of ggml."""
    name, (count, size) = f"Gguf{type_.replace('_', '')}", SIZES[type_]
    facts = {"type": type_, "encodes": type_ in ENCODERS}
    weights = type(f"{name}Weight", (GgufWeight,), {**facts, "__slots__": (), "__module__": __name__})
    members = {"weights": weights, "bytes_per_parameter": size / count, "__module__": __name__}
    return type(f"{name}Linear", (PackedLinear,), members)


#: format -> its layer, for the types with more than one number in a block
GGUF_FORMATS = {f"{_PREFIX}{type_}": _layer_of(type_) for type_, (count, _) in SIZES.items() if count > 1}
