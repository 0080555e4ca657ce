"""Products with a frozen weight in 8-bit floating point: numbers in e4m3, one float32 scale per row."""

from inweave.ops.fp8.feed_forward import frozen_feed_forward
from inweave.ops.fp8.linear import (
    Fp8Linear,
    Fp8Weight,
    device_problems,
    fits,
    joint_weight,
    quantize_linear,
    scaled_product,
)
from inweave.ops.fp8.quantize import Rows, quantize_rows, traced_rows
from inweave.ops.fp8.reference import LARGEST

__all__ = [
    "LARGEST", "Fp8Linear", "Fp8Weight", "Rows", "device_problems", "fits", "frozen_feed_forward", "joint_weight", "quantize_linear", "quantize_rows",
    "scaled_product", "traced_rows",
]  # fmt: skip
