"""Frozen weights in fewer bits: the contract of a format, and the registry of formats.

To add a format: one module of this folder with the classes of its weight and its layer, as in `fp8.py` if it
multiplies with its numbers, or as in `int8.py` if it dequantizes them, and one line in `registry.py`. Kernels go into a
folder of `ops`, like those of every other operation.
Formats of other libraries, whose weights are held as their files store them, are in `PACKED_FORMATS`.
`ops.linear` multiplies with the weight, `layers` finds it on a module, and `models.quantization` quantizes a
model through this contract.
"""

from inweave.ops.quantized.base import (
    QuantizedLayer,
    QuantizedLinear,
    QuantizedWeight,
    Rows,
    format_of,
    has_encoder,
    joint_weight,
    matrix_of,
    relative_error,
    requantized,
    restore_weight,
    weight_like,
)
from inweave.ops.quantized.registry import FORMATS, PACKED_FORMATS

__all__ = [
    "FORMATS", "PACKED_FORMATS", "QuantizedLayer", "QuantizedLinear", "QuantizedWeight", "Rows", "format_of",
    "has_encoder", "joint_weight", "matrix_of", "relative_error", "requantized", "restore_weight", "weight_like",
]  # fmt: skip
