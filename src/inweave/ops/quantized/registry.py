"""The formats of quantized weights by name: the values of the `quantize` setting besides "off"."""

from __future__ import annotations

from inweave.ops.quantized.base import FORMATS
from inweave.ops.quantized.fp8 import Fp8Linear
from inweave.ops.quantized.int8 import Int8Linear, RotatedInt8Linear
from inweave.ops.quantized.nf4 import Nf4Linear

FORMATS |= {"fp8": Fp8Linear, "int8": Int8Linear, "int8-hadamard": RotatedInt8Linear, "nf4": Nf4Linear}

__all__ = ["FORMATS"]
