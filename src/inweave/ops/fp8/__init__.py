"""Products with a frozen weight in 8-bit floating point: numbers in e4m3, one float32 scale per row.

`inweave.ops.quantized.fp8` is the format of weights that uses these operations.
"""

from inweave.ops.fp8.autograd import fp8_linear, scaled_product
from inweave.ops.fp8.feed_forward import frozen_feed_forward
from inweave.ops.fp8.reference import LARGEST
from inweave.ops.fp8.select import quantize_rows, traced_rows

__all__ = ["LARGEST", "fp8_linear", "frozen_feed_forward", "quantize_rows", "scaled_product", "traced_rows"]
