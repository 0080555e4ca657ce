"""The formats of quantized weights by name.

FORMATS           what weights can be quantized to: values of the `quantize` setting
PACKED_FORMATS    what files of other libraries hold, and stays like that with `quantize = "keep"`
"""

from __future__ import annotations

from inweave.ops.quantized.base import FORMATS, PACKED_FORMATS
from inweave.ops.quantized.bitsandbytes import Bnb4Linear
from inweave.ops.quantized.convolution import convolution_of
from inweave.ops.quantized.fp8 import Fp8Linear
from inweave.ops.quantized.gguf_layers import GGUF_FORMATS
from inweave.ops.quantized.int8 import Int8Linear, RotatedInt8Linear
from inweave.ops.quantized.nf4 import Nf4Linear
from inweave.ops.quantized.nf4_hadamard import RotatedNf4Linear
from inweave.ops.quantized.scaled import ScaledLinear

FORMATS |= {"fp8": Fp8Linear, "int8": Int8Linear, "int8-hadamard": RotatedInt8Linear, "nf4": Nf4Linear}
FORMATS["nf4-hadamard"] = RotatedNf4Linear
PACKED_FORMATS |= {"scaled": ScaledLinear, "bitsandbytes-4bit": Bnb4Linear, **GGUF_FORMATS}
for _linear in (*FORMATS.values(), *PACKED_FORMATS.values()):
    _linear.convolution = convolution_of(_linear)

__all__ = ["FORMATS", "PACKED_FORMATS"]
